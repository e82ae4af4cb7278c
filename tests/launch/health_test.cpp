#include "apps/launch/health.h"

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::launch;
using test::TemporaryDirectory;

TEST_CASE("uncorrected errors of memory are problems of a host, corrected ones are not", "[health]") {
  const TemporaryDirectory root;
  const std::string controller = root.path() + "/sys/devices/system/edac/mc/mc0";
  make_directories(controller);
  write_file_atomic(controller + "/ce_count", "12\n");
  write_file_atomic(controller + "/ue_count", "0\n");
  CHECK(examine(0.01, {.root = root.path()}).problems.empty());
  write_file_atomic(controller + "/ue_count", "1\n");
  CHECK(examine(0.01, {.root = root.path()}).problems ==
        std::vector<std::string>{"1 uncorrected memory error since the start of the system"});
}

TEST_CASE("a GPU with errors of memory, or one that does not answer, is a problem", "[health]") {
  const TemporaryDirectory root;
  const Health h = examine(0.01, {.root = root.path(), .nvml = FAKE_NVML, .gpus = {"GPU-fake", "GPU-gone"}});
  CHECK(h.problems ==
        std::vector<std::string>{"GPU GPU-fake: rows of its memory are remapped at the next reset",
                                 "GPU GPU-gone: the driver does not answer"});
  CHECK(problem_in(to_json(h).dump() + "\n") == h.problems[0]);
  CHECK(examine(0.01, {.root = root.path(), .nvml = "libnone.so", .gpus = {"GPU-fake"}}).problems.empty());
}
