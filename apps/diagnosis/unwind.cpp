// libdw finds the frames with the call frame information of the mapped files; the memory of the stack is the
// copy.
#include "apps/diagnosis/unwind.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include <cxxabi.h>
#include <elfutils/libdwfl.h>

namespace nrl::diagnosis {
namespace {

constexpr size_t most_frames = 64;

char* debug_path = nullptr;  // the standard places
const Dwfl_Callbacks callbacks = {.find_elf = dwfl_linux_proc_find_elf,
                                  .find_debuginfo = dwfl_standard_find_debuginfo,
                                  .section_address = nullptr,
                                  .debuginfo_path = &debug_path};

struct End {
  void operator()(Dwfl* dwfl) const { dwfl_end(dwfl); }
};
using Session = std::unique_ptr<Dwfl, End>;

std::string name_at(Dwfl* dwfl, uint64_t pc) {
  Dwfl_Module* module = dwfl_addrmodule(dwfl, pc);
  const char* symbol = module ? dwfl_module_addrname(module, pc) : nullptr;
  if (!symbol) return "?";
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  return status == 0 && demangled ? demangled.get() : symbol;
}

struct Walk {
  Dwfl* dwfl;
  std::vector<std::string> names;
};

int at_frame(Dwfl_Frame* frame, void* argument) {
  auto& walk = *static_cast<Walk*>(argument);
  Dwarf_Addr pc = 0;
  bool activation = false;
  if (!dwfl_frame_pc(frame, &pc, &activation)) return DWARF_CB_ABORT;
  walk.names.push_back(name_at(walk.dwfl, activation ? pc : pc - 1));  // the call, not what follows it
  return walk.names.size() < most_frames ? DWARF_CB_OK : DWARF_CB_ABORT;
}

// One thread of the copies.
struct Copy {
  const ThreadStack* thread;
  bool given = false;
};

pid_t next_thread(Dwfl*, void* argument, void** thread_argument) {
  auto& copy = *static_cast<Copy*>(argument);
  if (std::exchange(copy.given, true)) return 0;
  *thread_argument = argument;
  return static_cast<pid_t>(copy.thread->id);
}

bool read_memory(Dwfl*, Dwarf_Addr address, Dwarf_Word* result, void* argument) {
  const ThreadStack& t = *static_cast<Copy*>(argument)->thread;
  if (address < t.begin || t.bytes.size() < sizeof *result ||
      address - t.begin > t.bytes.size() - sizeof *result)
    return false;
  std::memcpy(result, t.bytes.data() + (address - t.begin), sizeof *result);
  return true;
}

bool set_registers(Dwfl_Thread* thread, void* argument) {
  const ThreadStack& t = *static_cast<Copy*>(argument)->thread;
  std::array<Dwarf_Word, stack_registers> registers;
  std::copy(t.registers.begin(), t.registers.end(), registers.begin());
  dwfl_thread_state_register_pc(thread, registers[instruction_pointer]);
  return dwfl_thread_state_registers(thread, 0, registers.size(), registers.data());
}

const Dwfl_Thread_Callbacks of_copies = {.next_thread = next_thread,
                                         .get_thread = nullptr,
                                         .memory_read = read_memory,
                                         .set_initial_registers = set_registers,
                                         .detach = nullptr,
                                         .thread_detach = nullptr};

}  // namespace

bool can_unwind() {
  return true;
}

std::vector<std::vector<std::string>> unwind(const ProcessStacks& stacks) {
  std::vector<std::vector<std::string>> out(stacks.threads.size());
  for (size_t i = 0; i < out.size(); ++i) {
    const ThreadStack& thread = stacks.threads[i];
    if (!thread.copied || stacks.maps.empty()) continue;
    const Session dwfl(dwfl_begin(&callbacks));
    std::string maps = stacks.maps;
    const std::unique_ptr<FILE, int (*)(FILE*)> file(::fmemopen(maps.data(), maps.size(), "r"), std::fclose);
    Copy copy{&thread};
    if (!dwfl || !file || dwfl_linux_proc_maps_report(dwfl.get(), file.get()) != 0 ||
        dwfl_report_end(dwfl.get(), nullptr, nullptr) != 0 ||
        !dwfl_attach_state(dwfl.get(), nullptr, static_cast<pid_t>(stacks.pid), &of_copies, &copy))
      continue;
    Walk walk{dwfl.get(), {}};
    dwfl_getthreads(
        dwfl.get(),
        [](Dwfl_Thread* t, void* argument) {
          dwfl_thread_getframes(t, at_frame, argument);
          return static_cast<int>(DWARF_CB_OK);
        },
        &walk);
    out[i] = std::move(walk.names);
  }
  return out;
}

std::vector<std::vector<std::string>> unwind_live(int64_t pid, const std::vector<ThreadStack>& threads) {
  std::vector<std::vector<std::string>> out(threads.size());
  const Session dwfl(dwfl_begin(&callbacks));
  const auto process = static_cast<pid_t>(pid);
  if (!dwfl || dwfl_linux_proc_report(dwfl.get(), process) != 0 ||
      dwfl_report_end(dwfl.get(), nullptr, nullptr) != 0 ||
      dwfl_linux_proc_attach(dwfl.get(), process, false) != 0)
    return out;
  for (size_t i = 0; i < threads.size(); ++i) {
    Walk walk{dwfl.get(), {}};
    dwfl_getthread_frames(dwfl.get(), static_cast<pid_t>(threads[i].id), at_frame, &walk);
    out[i] = std::move(walk.names);
  }
  return out;
}

}  // namespace nrl::diagnosis
