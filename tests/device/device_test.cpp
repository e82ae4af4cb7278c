// Which device a rank takes, for which devices kernels are, what the driver tells, host memory, how much
// memory the machine has.

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include <unistd.h>

#include "core/base/error.h"
#include "core/device/choose.h"
#include "core/device/cpu/binding.h"
#include "core/device/cpu/memory.h"
#include "core/device/cuda/architectures.h"
#include "core/device/cuda/devices.h"
#include "core/device/cuda/nvml.h"
#include "core/device/cuda/xid.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

namespace {

using namespace nrl;
using device::choose_ordinal;
using device::Stream;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// What all ranks get; -1 for a refusal, whose text must be the same on all.
std::vector<int> chosen(const std::vector<std::vector<std::string>>& seen, bool share,
                        std::string* text = nullptr) {
  std::vector<int> all;
  std::set<std::string> texts;
  for (size_t r = 0; r < seen.size(); ++r) {
    try {
      all.push_back(choose_ordinal(static_cast<int>(r), seen, share));
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::unavailable);
      texts.insert(e.what());
      all.push_back(-1);
    }
  }
  REQUIRE(texts.size() <= 1);
  if (text) *text = texts.empty() ? "" : *texts.begin();
  return all;
}

TEST_CASE("ranks take devices in turns", "[choose]") {
  using V = std::vector<int>;
  REQUIRE(choose_ordinal(2, 4, 4, false) == 2);
  REQUIRE(choose_ordinal(2, 3, 8, false) == 2);
  REQUIRE(choose_ordinal(5, 8, 4, true) == 1);
  REQUIRE_THROWS_WITH(choose_ordinal(0, 3, 2, false),
                      ContainsSubstring("3 ranks run on this node, which has 2 GPUs") &&
                          ContainsSubstring("kernels.share_device: true"));
  // One device per rank, all called 0.
  REQUIRE(chosen({{"a"}, {"b"}, {"c"}}, false) == V{0, 0, 0});
  REQUIRE(chosen({{"a", "b"}, {"b", "a"}}, false) == V{0, 0});
  REQUIRE(chosen({{"a", "b"}, {"a", "c"}}, false) == V{0, 1});
  std::string text;
  REQUIRE(chosen({{"a"}, {"a"}, {"b"}}, false, &text) == V{-1, -1, -1});
  REQUIRE(contains(text, "3 ranks run on this node, which has 2 GPUs;"));
  REQUIRE(chosen({{"a"}, {"a"}, {"b"}}, true) == V{0, 0, 0});
  REQUIRE(chosen({{"a"}, {"a", "b"}, {"a", "b"}}, true) == V{0, 1, 0});
  REQUIRE(chosen({{"a"}, {"a"}, {"b", "c"}}, false, &text) == V{-1, -1, -1});
  REQUIRE(contains(text, "some ranks see only GPUs that others take"));
  REQUIRE(chosen({{"a"}, {}}, true, &text) == V{-1, -1});
  REQUIRE(contains(text, "rank 1 of the 2 ranks on this node sees no GPU"));
}

TEST_CASE("kernels run where their architecture says", "[devices]") {
  using cuda::runs_on;
  REQUIRE(runs_on("90a", 9, 0));
  REQUIRE_FALSE(runs_on("90a", 10, 0));
  REQUIRE_FALSE(runs_on("90a", 8, 9));
  REQUIRE(runs_on("80", 8, 0));
  REQUIRE(runs_on("80", 8, 9));
  REQUIRE(runs_on("80", 12, 0));  // compiled from PTX when loaded
  REQUIRE_FALSE(runs_on("80", 7, 5));
  REQUIRE(runs_on("80-real", 8, 6));
  REQUIRE_FALSE(runs_on("80-real", 9, 0));
  REQUIRE(runs_on("80-virtual", 9, 0));
  REQUIRE(runs_on("100f", 10, 3));
  REQUIRE_FALSE(runs_on("100f", 11, 0));
  REQUIRE_FALSE(runs_on("103f", 10, 0));
  REQUIRE(runs_on("80;90a,100a", 10, 0));
  REQUIRE_FALSE(runs_on("", 9, 0));
  REQUIRE(cuda::architectures_text("80;90a,100f-real") == "8.0, 9.0a, 10.0f");
}

TEST_CASE("a machine without a usable GPU says why", "[devices]") {
  const cuda::Status status = cuda::query();
  if (status.problem.empty()) {
    REQUIRE_FALSE(status.devices.empty());
    REQUIRE_FALSE(status.driver.empty());
    return;
  }
  try {
    device::open_cuda(0);
    FAIL("opened");
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::unavailable);
    REQUIRE(contains(e.what(), status.problem));
  }
}

TEST_CASE("a device's id is written as the driver's tools write it", "[devices]") {
  char bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<char>(i * 17);
  REQUIRE(cuda::uuid_text(bytes) == "GPU-00112233-4455-6677-8899-aabbccddeeff");
}

TEST_CASE("the driver's management library is asked where it is", "[devices]") {
  REQUIRE(cuda::open_nvml("libno-such-library.so") == nullptr);
  const auto nvml = cuda::open_nvml(FAKE_NVML);
  REQUIRE(nvml);
  REQUIRE(nvml->driver_version() == "580.1");
  REQUIRE_FALSE(nvml->state("GPU-other"));
  const auto state = nvml->state("GPU-fake");
  REQUIRE(state);
  REQUIRE(state->memory_used == 40u);
  REQUIRE(state->memory == 100u);
  REQUIRE(*state->utilization == Approx(0.97));
  REQUIRE(state->memory_clock == 2619);
  REQUIRE(*state->energy == Approx(5.5));
  REQUIRE(state->ecc_errors == 2u);
  REQUIRE(*state->power == Approx(123.4));
  REQUIRE(state->clock == 1980);
  REQUIRE(state->temperature == 41);
  REQUIRE_FALSE(state->clock_limit);  // the function fails
  REQUIRE_FALSE(state->power_limit);  // there is no such function
  REQUIRE(state->throttled == std::vector<std::string>{"power", "temperature"});
  REQUIRE(state->remap_pending);
  REQUIRE_FALSE(state->remap_failed);
}

TEST_CASE("the driver tells errors of a device that is watched", "[device]") {
  const auto nvml = cuda::open_nvml(FAKE_NVML);
  REQUIRE(nvml);
  CHECK_FALSE(nvml->wait_for_error(1));
  CHECK_FALSE(nvml->watch("GPU-other"));
  REQUIRE(nvml->watch("GPU-fake"));
  CHECK_FALSE(nvml->wait_for_error(1));
  for (const auto& [told, xid] : {std::pair("31", 31), std::pair("48", 48), std::pair("lost", 79)}) {
    ::setenv("FAKE_NVML_XID", told, 1);
    CHECK(nvml->wait_for_error(1) == xid);
    CHECK_FALSE(nvml->wait_for_error(1));
  }
}

TEST_CASE("errors of a device have an action", "[device]") {
  CHECK(cuda::describe_xid(79) == "Xid 79 (it has fallen off the bus): restart the node");
  CHECK(cuda::describe_xid(94) ==
        "Xid 94 (an uncorrectable memory error, contained in one process): start the run again");
  CHECK(cuda::describe_xid(63) == "Xid 63 (a row of memory is remapped at the next reset)");
  CHECK(cuda::describe_xid(7) == "Xid 7");
  CHECK(cuda::recovery_of(48) == cuda::Recovery::reset_gpu);
}

TEST_CASE("ranks of a node share its CPUs", "[device]") {
  using Cpus = std::vector<int>;
  const Cpus allowed = cpu::allowed_cpus();
  REQUIRE(!allowed.empty());
  // Lists are divided in their order.
  Cpus many;
  for (int i = 0; i < 8; ++i) many.push_back(i);
  CHECK(cpu::cpus_of_rank("0-7", many, 0, 2) == Cpus{0, 1, 2, 3});
  CHECK(cpu::cpus_of_rank("0-7", many, 1, 2) == Cpus{4, 5, 6, 7});
  CHECK(cpu::cpus_of_rank("7,0-3", many, 0, 1) == Cpus{7, 0, 1, 2, 3});
  const auto refusal = [](std::string_view binding, const Cpus& mask, int ranks) -> std::string {
    try {
      (void)cpu::cpus_of_rank(binding, mask, 0, ranks);
    } catch (const Error& e) {
      CHECK(e.code() == Exit::config);
      return e.what();
    }
    return "";
  };
  CHECK(contains(refusal("0-7,9", many, 1), "may not use CPU 9; it may use 0-7"));
  CHECK(contains(refusal("3", many, 2), "1 CPUs for 2 ranks"));
  // Cores are whole: every CPU is in exactly one.
  Cpus in_cores;
  for (const Cpus& core : cpu::cores_of(allowed)) in_cores.insert(in_cores.end(), core.begin(), core.end());
  std::sort(in_cores.begin(), in_cores.end());
  CHECK(in_cores == allowed);
  const int ranks = static_cast<int>(cpu::cores_of(allowed).size());
  Cpus all;
  for (int r = 0; r < ranks; ++r)
    for (const int cpu : cpu::cpus_of_rank("auto", allowed, r, ranks)) all.push_back(cpu);
  std::sort(all.begin(), all.end());
  CHECK(all == allowed);
  CHECK(contains(refusal("auto", allowed, 5000), "cores for 5000 ranks"));
  // A thread that is bound stays there, with all that it starts.
  std::thread([&] {
    cpu::bind_to({allowed.back()});
    CHECK(cpu::allowed_cpus() == Cpus{allowed.back()});
    std::thread([&] { CHECK(cpu::allowed_cpus() == Cpus{allowed.back()}); }).join();
  }).join();
  CHECK(cpu::allowed_cpus() == allowed);
}

}  // namespace

TEST_CASE("host memory gives its end back and keeps its beginning", "[host_memory]") {
  cpu::HostMemory memory(1 << 20);
  std::memset(memory.data(), 7, memory.size());
  for (const size_t bytes : {size_t{300001}, size_t{300000}, size_t{4096}, size_t{1}}) {
    memory.shrink(bytes);
    CHECK(memory.size() == bytes);
    CHECK(memory.data()[bytes - 1] == std::byte{7});
  }
  CHECK_THROWS_AS(memory.shrink(2), Error);
  memory.shrink(0);
  CHECK(memory.data() == nullptr);
  CHECK(memory.size() == 0);
}

TEST_CASE("the memory limit of a control group is found", "[cpu]") {
  const auto root = std::filesystem::temp_directory_path() / ("nrl_cgroup_" + std::to_string(::getpid()));
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root / name).parent_path());
    std::ofstream(root / name) << text;
  };
  write("memory.max", "max\n");
  write("job/memory.max", "8000000\n");
  write("job/step/memory.max", "max\n");
  write("memory/batch/memory.limit_in_bytes", "5000\n");
  const auto limit = [&](const std::string& membership) {
    return cpu::control_group_limit(membership, root.string());
  };
  CHECK(limit("0::/job/step\n") == 8000000);  // a group above
  CHECK(limit("0::/job\n") == 8000000);
  CHECK(limit("0::/\n") == SIZE_MAX);
  CHECK(limit("0::/elsewhere/in/the/host\n") == SIZE_MAX);
  CHECK(limit("12:cpuset:/batch\n4:memory,hugetlb:/batch\n0::/job\n") == 5000);
  CHECK(limit("12:cpuset:/batch\n") == SIZE_MAX);
  CHECK(limit("nonsense\n:\n\n") == SIZE_MAX);
  std::filesystem::remove_all(root);
  CHECK(cpu::machine_memory() > (size_t{1} << 20));
}
