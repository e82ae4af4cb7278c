// Kernels with seeded bugs, each with a fixed twin (seeded_kernels.h): proves that the fiber engine and the
// sanitizers report the one and not the other. Built three times: plain, with the address and
// undefined-behavior sanitizers, and with the thread sanitizer.
//
//   seeded_bugs_BUILD check             every bug that this build can see, in a process of its own
//   seeded_bugs_BUILD run NAME [fixed]  one kernel
//   seeded_bugs_BUILD fixed             all that are fixed

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/device/kernel.h"
#include "tests/kernels/seeded_kernels.h"

namespace {

// --- the table -----------------------------------------------------------------------------------

struct Bug {
  const char* name;
  void (*launch)(Memory&, bool fixed);
  const char* plain;  ///< what this build must say; null when it cannot see the bug
  const char* address;
  const char* thread;
};

constexpr const char* nan = "NaN in the result";
constexpr const char* race = "ThreadSanitizer: data race";
constexpr const char* bounds = "ERROR: AddressSanitizer";

#define LAUNCH(kernel, grid, shared, ...)                                            \
  [](Memory& m, [[maybe_unused]] bool fixed) {                                       \
    NRL_LAUNCH((kernel), grid, threads, shared, nullptr, m.out.data(), __VA_ARGS__); \
  }
/// On several threads of the simulator, or with several blocks that take turns on one, so that they do wait.
template <Turn bug, int os_threads = 4, int resident = 1>
void launch_turns(Memory& m, bool fixed) {
  nrl::sim::set_options({nrl::sim::Order::random, 1, os_threads, resident});
  NRL_LAUNCH((take_turns<bug>), blocks, threads, 0, nullptr, m.out.data(), m.arrived, fixed);
}
constexpr size_t dynamic = threads * sizeof(float), tile = threads * sizeof(uint4);

const Bug bugs[] = {
    {"read_after_write", LAUNCH(read_after_write, 1, 0, fixed), nan, nan, race},
    {"write_after_read", LAUNCH(write_after_read, 1, 0, fixed), nullptr, nullptr, race},
    {"unwritten", LAUNCH(unwritten, 1, 0, fixed), nan, nan, nan},
    {"unwritten_dynamic", LAUNCH(unwritten_dynamic, 1, dynamic, fixed), nan, nan, nan},
    {"divergent_barrier", LAUNCH(divergent_barrier, 1, 0, fixed), "divergent __syncthreads",
     "divergent __syncthreads", "divergent __syncthreads"},
    {"deadlock", LAUNCH(deadlock, 1, 0, fixed), "deadlock", "deadlock", "deadlock"},
    {"lane_not_in_mask", LAUNCH(lane_not_in_mask, 1, 0, fixed), "is not in its mask", "is not in its mask",
     "is not in its mask"},
    {"inactive_lane", LAUNCH(inactive_lane, 1, 0, fixed), "does not take part", "does not take part",
     "does not take part"},
    {"mixed_operations", LAUNCH(mixed_operations, 1, 0, fixed), "different operations",
     "different operations", "different operations"},
    {"missing_syncwarp", LAUNCH(missing_syncwarp, 1, 0, fixed), nan, nan, race},
    {"shuffle_for_syncwarp", LAUNCH(shuffle_for_syncwarp, 1, 0, fixed), nullptr, nullptr, race},
    {"vote_for_syncwarp", LAUNCH(vote_for_syncwarp, 1, 0, fixed), nullptr, nullptr, race},
    {"mma_for_syncwarp", LAUNCH(mma_for_syncwarp, 1, 0, fixed), nullptr, nullptr, race},
    {"write_after_shuffle", LAUNCH(write_after_shuffle, 1, 0, fixed), nullptr, nullptr, race},
    {"syncwarp_after_exit", LAUNCH(syncwarp_after_exit, 1, 0, fixed), nullptr, nullptr, race},
    {"missing_wait", LAUNCH(missing_wait, 1, 0, m.in.data(), fixed), nan, nan, nan},
    {"wait_for_too_few", LAUNCH(wait_for_too_few, 1, 0, m.in.data(), fixed), nan, nan, nan},
    {"wait_without_barrier", LAUNCH(wait_without_barrier, 1, 0, m.in.data(), fixed), nan, nan, race},
    {"missing_wait_of_a_stage", LAUNCH(missing_wait_of_a_stage, 1, 0, m.in.data(), fixed), nan, nan, nan},
    {"copy_over_a_tile_in_use", LAUNCH(copy_over_a_tile_in_use, 1, 0, m.in.data(), fixed), nan, nan, race},
    {"misaligned_matrix", LAUNCH(misaligned_matrix, 1, tile, fixed), "not aligned", "not aligned",
     "not aligned"},
    {"matrix_outside_tile", LAUNCH(matrix_outside_tile, 1, tile, fixed), nullptr, bounds, nullptr},
    {"matrix_before_barrier", LAUNCH(matrix_before_barrier, 1, 0, fixed), nan, nan, race},
    {"matrix_overwritten", LAUNCH(matrix_overwritten, 1, 0, fixed), nullptr, nullptr, race},
    {"sum_out_of_turn", LAUNCH(sum_out_of_turn, blocks, 0, m.arrived, fixed), nullptr, nullptr, race},
    {"turn_without_ticket", LAUNCH(turn_without_ticket, blocks, 0, m.arrived, fixed), "has not run",
     "has not run", "has not run"},
    {"missing_signal", LAUNCH(missing_signal, blocks, 0, m.arrived, fixed), "waits for its turn",
     "waits for its turn", "waits for its turn"},
    {"turn_not_awaited", launch_turns<Turn::not_awaited, 1, 3>, nan, nan, race},
    {"relaxed_signal", launch_turns<Turn::relaxed_signal>, nullptr, nullptr, race},
    {"relaxed_wait", launch_turns<Turn::relaxed_wait>, nullptr, nullptr, race},
    {"signal_before_barrier", launch_turns<Turn::signal_before_barrier>, nullptr, nullptr, race},
    {"one_lane_waits", launch_turns<Turn::one_lane_waits>, nullptr, nullptr, race},
    {"relaxed_signal_on_one_thread", launch_turns<Turn::relaxed_signal, 1, 3>, nullptr, nullptr, race},
    {"block_race", LAUNCH(block_race, blocks, 0, fixed), nullptr, nullptr, race},
    {"outside_static", LAUNCH(outside_static, 1, 0, fixed), nullptr, bounds, nullptr},
    {"outside_dynamic", LAUNCH(outside_dynamic, 1, dynamic, fixed), nullptr, bounds, nullptr},
    {"outside_global", LAUNCH(outside_global, blocks, 0, fixed), nullptr, bounds, nullptr},
    {"outside_local", LAUNCH(outside_local, 1, 0, fixed), nullptr, "seeded_kernels.h", nullptr},
    {"vector_past_the_end", LAUNCH(vector_past_the_end, 1, 0, m.in.data(), fixed), nullptr, bounds, nullptr},
    {"copy_past_the_end", LAUNCH(copy_past_the_end, 1, 0, m.in.data(), fixed), nullptr, bounds, nullptr},
    {"misaligned_global", LAUNCH(misaligned_global, 1, 0, m.in.data(), fixed), "not aligned", "not aligned",
     "not aligned"},
    {"misaligned_shared", LAUNCH(misaligned_shared, 1, 0, fixed), "not aligned", "not aligned",
     "not aligned"},
    {"misaligned_plain", LAUNCH(misaligned_plain, 1, 0, m.in.data(), fixed), nullptr, "misaligned address",
     nullptr},
    {"overflowing_offset", LAUNCH(overflowing_offset, 1, 0, 1 << 16, 1 << 16, fixed), nullptr,
     "signed integer overflow", nullptr},
    {"much_static", LAUNCH(much_static, 1, 0, fixed), "static shared memory", "static shared memory",
     "static shared memory"},
    {"much_static_and_dynamic",
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((much_static), 1, threads, (fixed ? 190 : 200) * 1024, nullptr, m.out.data(), true);
     },
     "of dynamic shared memory are more", "of dynamic shared memory are more",
     "of dynamic shared memory are more"},
    {"much_unasked",  // together more than a GPU gives to a launch that does not ask for dynamic memory
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((much_static), 1, threads, (fixed ? 16 : 20) * 1024, nullptr, m.out.data(), true);
     },
     "of dynamic shared memory are more", "of dynamic shared memory are more",
     "of dynamic shared memory are more"},
    {"much_dynamic",
     [](Memory& m,
        bool fixed) { NRL_LAUNCH((nothing), 1, threads, (fixed ? 227 : 228) * 1024, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"many_threads",
     [](Memory& m, bool fixed) { NRL_LAUNCH((nothing), 1, fixed ? 64 : 2048, 0, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"deep_block",
     [](Memory& m,
        bool fixed) { NRL_LAUNCH((nothing), 1, dim3(1, 1, fixed ? 64 : 65), 0, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"wide_grid",
     [](Memory& m,
        bool fixed) { NRL_LAUNCH((nothing), dim3(1, fixed ? 4 : 65536), 1, 0, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"empty_grid",
     [](Memory& m, bool fixed) { NRL_LAUNCH((nothing), fixed ? 1 : 0, 1, 0, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
};

// --- running them --------------------------------------------------------------------------------

constexpr const char* clean = "nothing wrong";

/// One kernel; the process's exit code.
int run(const Bug& bug, bool fixed) {
  const nrl::sim::Options before = nrl::sim::options();
  Memory memory;
  try {
    bug.launch(memory, fixed);
    // Again: the thread sanitizer tells other pairs of blocks apart in every second launch.
    memory.arrived[0] = memory.arrived[1] = 0;
    bug.launch(memory, fixed);
  } catch (const nrl::sim::KernelError& e) {
    std::printf("KernelError: %s\n", e.what());
    return 1;
  }
  nrl::sim::set_options(before);
  for (float x : memory.out) {
    if (std::isnan(x)) {
      std::printf("%s\n", nan);
      return 1;
    }
  }
  std::printf("%s\n", clean);
  return 0;
}

int run(std::string_view name, bool fixed) {
  for (const Bug& bug : bugs)
    if (name == bug.name) return run(bug, fixed);
  std::printf("there is no kernel %s\n", std::string(name).c_str());
  return 64;
}

/// All fixed kernels, in one process: it is slow to start with a sanitizer. Ends at the first that is wrong.
int run_fixed() {
  for (const Bug& bug : bugs) {
    std::printf("%s: ", bug.name);
    std::fflush(stdout);
    if (const int code = run(bug, true)) return code;
  }
  return 0;
}

/// Output of this program with the arguments.
std::string output_of(const std::string& self, const std::string& arguments) {
  const std::string command = "'" + self + "' " + arguments + " 2>&1";
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
  auto expect = [&failures](const std::string& what, const std::string& output, const char* text) {
    if (output.find(text) != output.npos) return;
    ++failures;
    std::printf("FAILED %s: no \"%s\" in:\n%s\n", what.c_str(), text, output.c_str());
  };
  for (const Bug& bug : bugs) {
    const char* expected = bug.NRL_BUILD;
    if (expected) {
      ++seen;
      const std::string output = output_of(self, std::string("run ") + bug.name);
      expect(bug.name, output, expected);
      // Every report names the place: kernels by name, memory errors and races by file and line.
      if (expected != nan)
        expect(bug.name, output, output.find("KernelError") == output.npos ? "seeded_kernels.h:" : "kernel ");
    }
  }
  const std::string last = std::string(std::end(bugs)[-1].name) + ": " + clean;
  expect("fixed kernels", output_of(self, "fixed"), last.c_str());
  std::printf("%d seeded bugs reported, %d failures\n", seen, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return check(argv[0]);
  if (mode == "run" && argc > 2) return run(argv[2], argc > 3 && std::strcmp(argv[3], "fixed") == 0);
  if (mode == "fixed") return run_fixed();
  std::fprintf(stderr, "usage: seeded_bugs check | run NAME [fixed] | fixed\n");
  return 64;
}
