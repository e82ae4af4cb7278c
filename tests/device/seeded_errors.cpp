// Host code with seeded errors of streams and memory: what the simulated device and the sanitizers report,
// and that they report nothing of the corrected code.
//
//   seeded_errors check            runs every case in a process of its own
//   seeded_errors run NAME [fixed]

#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "core/device/kernel.h"
#include "tests/sim/sim.h"

namespace {

using namespace nrl;
using device::CopyKind;
using device::Event;
using device::Memory;
using device::Stream;

__global__ void add_one(int* p, int n) {
  if (static_cast<int>(threadIdx.x) < n) p[threadIdx.x] += 1;
}

struct Bench {
  std::unique_ptr<device::Runtime> runtime = device::open_sim();
  Stream a{*runtime}, b{*runtime};
  Event event{*runtime};
  Memory x{*runtime, Memory::Kind::device, 128}, pinned{*runtime, Memory::Kind::pinned, 128};
  int* values() const { return reinterpret_cast<int*>(x.data()); }
  void add(const Stream& stream, int n = 32) const {
    NRL_LAUNCH((add_one), 1, 32, 0, stream.get(), values(), n);
  }
  void write(int value) const {  // not memset: GCC does not instrument the one it inlines
    for (int i = 0; i < 32; ++i) reinterpret_cast<volatile int*>(pinned.data())[i] = value;
  }
  void fetch(const Stream& stream) const {
    runtime->copy(pinned.data(), x.data(), 128, CopyKind::device_to_host, stream.get());
  }
};

// What names the error in the output of each build; null: that build cannot see it.
struct Case {
  const char* name;
  void (*run)(Bench& t, bool fixed);
  const char* address;
  const char* thread;
};
const Case cases[] = {
    {"missing_event_wait",
     [](Bench& t, bool fixed) {
       t.add(t.a);
       t.event.record(t.a.get());
       if (fixed) t.event.wait_in(t.b.get());
       t.add(t.b);
       t.runtime->synchronize();
     },
     nullptr, "data race"},
    {"event_recorded_too_early",
     [](Bench& t, bool fixed) {
       if (!fixed) t.event.record(t.a.get());
       t.add(t.a);
       if (fixed) t.event.record(t.a.get());
       t.event.wait_in(t.b.get());
       t.add(t.b);
       t.runtime->synchronize();
     },
     nullptr, "data race"},
    {"host_reads_before_the_copy",
     [](Bench& t, bool fixed) {
       t.fetch(t.a);
       t.event.record(t.a.get());
       t.add(t.b, 0);
       (fixed ? t.a : t.b).synchronize();
       volatile int sink = *reinterpret_cast<int*>(t.pinned.data());
       (void)sink;
       t.runtime->synchronize();
     },
     nullptr, "data race"},
    {"pinned_memory_reused",
     [](Bench& t, bool fixed) {
       t.write(1);
       t.runtime->copy(t.x.data(), t.pinned.data(), 128, CopyKind::host_to_device, t.a.get());
       if (fixed) t.a.synchronize();
       t.write(2);
       t.runtime->synchronize();
     },
     nullptr, "data race"},
    {"kernel_past_the_end",
     [](Bench& t, bool fixed) {
       const Memory small(*t.runtime, Memory::Kind::device, fixed ? 128 : 124);
       NRL_LAUNCH((add_one), 1, 32, 0, t.a.get(), reinterpret_cast<int*>(small.data()), 32);
       t.a.synchronize();
     },
     "AddressSanitizer", nullptr},
    {"host_reads_device_memory",
     [](Bench& t, bool fixed) {
       t.add(t.a);
       t.a.synchronize();
       volatile int sink = fixed ? 0 : *t.values();
       (void)sink;
     },
     "SEGV", "DEADLYSIGNAL"},
    {"memory_used_after_its_release",
     [](Bench& t, bool fixed) {
       Memory gone(*t.runtime, Memory::Kind::device, 128);
       int* p = reinterpret_cast<int*>(gone.data());
       if (!fixed) gone = Memory();
       NRL_LAUNCH((add_one), 1, 32, 0, t.a.get(), p, 32);
       t.a.synchronize();
     },
     "use-after-poison", "DEADLYSIGNAL"},
    {"stream_destroyed_before_a_launch",
     [](Bench& t, bool fixed) {
       Stream stream(*t.runtime);
       const device::StreamHandle handle = fixed ? t.a.get() : Stream(*t.runtime).get();
       NRL_LAUNCH((add_one), 1, 32, 0, handle, t.values(), 32);
       t.runtime->synchronize();
     },
     "one that was destroyed", "one that was destroyed"},
};

constexpr const char* clean = "nothing wrong";

int run(std::string_view name, bool fixed) {
  for (const Case& c : cases) {
    if (name != c.name) continue;
    try {
      Bench bench;
      c.run(bench, fixed);
    } catch (const Error& e) {
      std::printf("error: %s\n", e.what());
      return 1;
    }
    std::printf("%s\n", clean);
    return 0;
  }
  return 64;
}

std::string output_of(const std::string& self, const std::string& arguments) {
  const std::string command = "'" + self + "' run " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return "cannot start " + command;
  std::string text;
  std::array<char, 4096> part;
  while (const size_t n = fread(part.data(), 1, part.size(), pipe)) text.append(part.data(), n);
  pclose(pipe);
  return text;
}

int check(const std::string& self) {
  int failures = 0, seen = 0;
  const auto expect = [&](const std::string& what, const std::string& output, const char* text) {
    if (output.find(text) != output.npos) return;
    ++failures;
    std::printf("FAILED %s: no \"%s\" in:\n%s\n", what.c_str(), text, output.c_str());
  };
  for (const Case& c : cases) {
    if (const char* expected = c.NRL_BUILD) {
      ++seen;
      expect(c.name, output_of(self, c.name), expected);
    }
    expect(std::string(c.name) + " fixed", output_of(self, std::string(c.name) + " fixed"), clean);
  }
  std::printf("%d seeded errors reported, %d failures\n", seen, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return check(argv[0]);
  if (mode == "run" && argc > 2) return run(argv[2], argc > 3 && std::strcmp(argv[3], "fixed") == 0);
  std::fprintf(stderr, "usage: seeded_errors check | run NAME [fixed]\n");
  return 64;
}
