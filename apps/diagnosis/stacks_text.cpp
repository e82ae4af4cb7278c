#include "apps/diagnosis/stacks_text.h"

#include <cstring>
#include <string_view>

#include <spdlog/fmt/fmt.h>

#include "apps/diagnosis/unwind.h"
#include "core/base/error.h"

namespace nrl::diagnosis {
namespace {

// "nrl::train::StepLoop::run() <- main", without arguments, and of other libraries the innermost only.
std::string chain_of(const std::vector<std::string>& names) {
  constexpr size_t most_shown = 8;
  std::string text;
  size_t shown = 0, left_out = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    std::string name = names[i];
    for (const std::string_view noise : {"(anonymous namespace)::", "[abi:cxx11]"})
      for (size_t at = name.find(noise); at != std::string::npos; at = name.find(noise))
        name.erase(at, noise.size());
    name = name.substr(0, name.find_first_of("(@"));  // without arguments and version
    if (i > 0 && name.find("nrl::") == std::string::npos) continue;
    if (const size_t begin = name.find("nrl::"); begin != std::string::npos)
      name.erase(0, begin);  // its result
    if (shown == most_shown) {
      ++left_out;
      continue;
    }
    text += (shown++ > 0 ? " <- " : "") + name;
  }
  return left_out > 0 ? fmt::format("{} <- {} more", text, left_out) : text;
}

// Without names: the instruction, and words of the stack that may be return addresses, in the program.
std::string addresses_of(const ThreadStack& t, const std::vector<Mapping>& mappings) {
  constexpr size_t most_addresses = 16;
  std::vector<uint64_t> candidates{t.registers[instruction_pointer]};
  for (size_t at = 0; at + sizeof(uint64_t) <= t.bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, t.bytes.data() + at, sizeof word);
    candidates.push_back(word);
  }
  if (mappings.empty()) return "";
  const Mapping& program = mappings.front();
  std::string found;
  size_t count = 0;
  for (const uint64_t word : candidates)
    if (word >= program.begin && word < program.end && ++count <= most_addresses)
      found += fmt::format(" {:#x}", word - program.begin + program.offset);
  return count > 0 ? fmt::format("addr2line -Cfpe {}{}", program.path, found) : "";
}

}  // namespace

std::string text_of(const ProcessStacks& stacks) {
  return text_of(stacks, unwind(stacks));
}

std::string describe_live(int64_t pid) {
  const ProcessStacks live{.rank = 0, .attempt = 0, .pid = pid, .threads = threads_of(pid), .maps = {}};
  if (live.threads.empty()) fail(Exit::no_input, "there is no process {} on this host", pid);
  return text_of(live, unwind_live(pid, live.threads));
}

std::string text_of(const ProcessStacks& stacks, const std::vector<std::vector<std::string>>& names) {
  const std::vector<Mapping> mappings = executable_mappings(stacks.maps);
  std::string text;
  for (size_t i = 0; i < stacks.threads.size(); ++i) {
    const ThreadStack& t = stacks.threads[i];
    text +=
        fmt::format("  thread {} ({}, {}{})", t.name, t.id, t.state, t.wchan.empty() ? "" : " in " + t.wchan);
    if (!names[i].empty())
      text += ": " + chain_of(names[i]);
    else if (const std::string addresses = t.copied ? addresses_of(t, mappings) : ""; !addresses.empty())
      text += ": " + addresses;
    else if (!t.syscall.empty())
      text += ": system call " + t.syscall.substr(0, t.syscall.find(' '));
    text += "\n";
  }
  return text;
}

}  // namespace nrl::diagnosis
