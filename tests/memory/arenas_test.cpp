// The memory of Tier::host: page-locked beside a GPU, in a file in a CPU run.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/error.h"
#include "memory/plan.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::memory;

namespace {

/// A directory on a disk that is removed at the end.
struct Scratch {
  Scratch() {
    std::string name = "/var/tmp/nrl-arenas-XXXXXX";
    REQUIRE(mkdtemp(name.data()));
    path = name;
  }
  ~Scratch() { std::filesystem::remove_all(path); }
  std::string path;
};

int64_t resident_file_pages() {
  return cpu::resident_memory().files + cpu::resident_memory().shared;
}

Exit exit_of(const auto& body) {
  try {
    body();
  } catch (const Error& e) {
    INFO(e.what());
    CHECK(std::string(e.what()).find("memory.offload_dir") != std::string::npos);
    return e.code();
  }
  return Exit::ok;
}

}  // namespace

TEST_CASE("offloaded memory of a CPU run lies in a file without a name", "[memory]") {
  const Scratch scratch;
  constexpr int64_t bytes = int64_t{24} << 20;
  MemoryPlan plan;
  const auto weights = plan.add("weights", Category::weights, 1000);
  const auto state = plan.add("state", Category::optimizer, bytes, Tier::host);
  const auto more = plan.add("more", Category::optimizer, 100, Tier::host);
  plan.solve();
  const int64_t before = resident_file_pages();
  const Arenas arenas(plan, scratch.path);
  CHECK(std::filesystem::is_empty(scratch.path));
  auto* values = static_cast<unsigned char*>(arenas.at(plan, state));
  std::memset(arenas.at(plan, weights), 1, 1000);
  CHECK(std::all_of(values, values + bytes, [](unsigned char c) { return c == 0; }));
  std::memset(arenas.at(plan, more), 7, 100);
  for (int64_t i = 0; i < bytes; ++i) values[i] = static_cast<unsigned char>(i % 251);
  CHECK(resident_file_pages() - before >= bytes);

  // Half of it is taken out of memory, from the middle of a page on, then all; no contents are lost.
  arenas.evict(values + 100, bytes / 2);
  CHECK(resident_file_pages() - before <= bytes / 2 + (1 << 20));
  arenas.evict();
  CHECK(resident_file_pages() - before < 1 << 20);
  arenas.prefetch(values, bytes);
  int64_t wrong = 0;
  for (int64_t i = 0; i < bytes; ++i) wrong += values[i] != static_cast<unsigned char>(i % 251);
  CHECK(wrong == 0);
  CHECK(static_cast<unsigned char*>(arenas.at(plan, more))[99] == 7);
}

TEST_CASE("the space of the file is reserved at the start and freed when the process is killed", "[memory]") {
  const Scratch scratch;
  constexpr int64_t bytes = int64_t{256} << 20;
  const auto free_space = [&] { return static_cast<int64_t>(std::filesystem::space(scratch.path).free); };
  const int64_t before = free_space();
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    MemoryPlan plan;
    plan.add("state", Category::optimizer, bytes, Tier::host);
    plan.solve();
    const Arenas arenas(plan, scratch.path);
    const char one = 1;
    [[maybe_unused]] const auto written = write(ready[1], &one, 1);
    for (;;) pause();
  }
  char one = 0;
  REQUIRE(read(ready[0], &one, 1) == 1);
  CHECK(before - free_space() > bytes / 2);  // others use the disk, too
  REQUIRE(kill(child, SIGKILL) == 0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(before - free_space() < bytes / 2);
  CHECK(std::filesystem::is_empty(scratch.path));
  close(ready[0]);
  close(ready[1]);
}

TEST_CASE("a directory that cannot hold offloaded memory is refused", "[memory]") {
  const Scratch scratch;
  CHECK(exit_of([&] { cpu::FileMemory(scratch.path + "/missing", 100); }) == Exit::cannot_create);
  // Larger than any disk of a test machine.
  CHECK(exit_of([&] { cpu::FileMemory(scratch.path, size_t{1} << 45); }) == Exit::io);
  CHECK(cpu::scratch_directory(scratch.path) == scratch.path);
  std::ifstream mounts("/proc/mounts");
  const std::string text(std::istreambuf_iterator<char>(mounts), {});
  if (text.find(" /dev/shm tmpfs") != std::string::npos)
    CHECK(exit_of([] { cpu::scratch_directory("/dev/shm"); }) == Exit::config);
}

TEST_CASE("a dry run reserves no offloaded memory", "[memory]") {
  MemoryPlan plan;
  const auto state = plan.add("state", Category::optimizer, int64_t{8} << 30, Tier::host);
  plan.solve();
  const Arenas arenas(plan);
  CHECK(*static_cast<unsigned char*>(arenas.at(plan, state)) == 0);
  arenas.evict();  // nothing
}

TEST_CASE("offloaded memory of a GPU run is page-locked", "[memory]") {
  const auto device = device::open_sim();
  const device::Stream stream(*device);
  MemoryPlan plan;
  const auto weights = plan.add("weights", Category::weights, 1000);
  const auto staging = plan.add("staging", Category::data, 1000, Tier::pinned);
  const auto state = plan.add("state", Category::optimizer, 1000, Tier::host);
  plan.solve();
  const Arenas arenas(plan, *device, stream.get());
  auto* values = static_cast<unsigned char*>(arenas.at(plan, state));
  CHECK(std::all_of(values, values + 1000, [](unsigned char c) { return c == 0; }));
  CHECK(arenas.at(plan, staging) != arenas.at(plan, state));
  // A copy of memory that is not page-locked would be done at once, not in the order of the stream.
  device->fill(arenas.at(plan, weights), 3, 1000, stream.get());
  device->copy(values, arenas.at(plan, weights), 1000, device::CopyKind::device_to_host, stream.get());
  CHECK(values[999] == 0);
  stream.synchronize();
  CHECK(values[999] == 3);
}
