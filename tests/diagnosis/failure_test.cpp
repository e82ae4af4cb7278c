#include "apps/monitor/failure.h"

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::monitor;
using test::error_of;
using test::TemporaryDirectory;

namespace {

Failure example() {
  return {.kind = "rank_hung",
          .exit_code = 80,
          .retryable = true,
          .text = "rank 3: \"quoted\"\n  = and a note",
          .run_id = "abc12345",
          .attempt = 2,
          .rank = 3,
          .host = "node1",
          .pid = 4711,
          .phase = "computing",
          .step = 812,
          .completed = 811,
          .checkpoint = "ckpt/step-800",
          .failed_at = 1000.5};
}

}  // namespace

TEST_CASE("failure.json is read back", "[failure]") {
  const TemporaryDirectory dir;
  CHECK(!read_failure(dir.path()));
  REQUIRE(write_failure(dir.path(), example()));
  CHECK(to_json(*read_failure(dir.path())).dump() == to_json(example()).dump());
  Failure of_all = example();
  of_all.rank.reset();
  of_all.checkpoint.clear();
  CHECK(to_json(failure_from(to_json(of_all), "f")).dump() == to_json(of_all).dump());
}

TEST_CASE("the first failure of an attempt counts; the next attempt puts it aside", "[failure]") {
  const TemporaryDirectory dir;
  REQUIRE(write_failure(dir.path(), example()));
  Failure other = example();
  other.kind = "peer_lost";
  CHECK(!write_failure(dir.path(), other));
  CHECK(read_failure(dir.path())->kind == "rank_hung");
  put_failure_aside(dir.path());
  CHECK(!path_exists(dir / failure_file));
  other.attempt = 3;
  CHECK(write_failure(dir.path(), other));
  put_failure_aside(dir.path());
  put_failure_aside(dir.path());  // nothing left
  const std::string lines = read_file(dir / failures_file, 1 << 20);
  CHECK(lines == to_json(example()).dump() + "\n" + to_json(other).dump() + "\n");
  CHECK(list_directory(dir.path()) == std::vector<std::string>{failures_file});
}

TEST_CASE("a failure takes the space that was reserved for it", "[failure]") {
  const TemporaryDirectory dir;
  reserve_failure_space(dir.path());
  CHECK(std::filesystem::file_size(dir / failure_space_file) >= to_json(example()).dump(2).size());
  // As on a full disk: nothing can be created or allocated, but what exists can be overwritten and renamed.
  set_file_op_hook([](FileOp op, const std::string&) {
    return op == FileOp::create || op == FileOp::allocate ? ENOSPC : 0;
  });
  CHECK(write_failure(dir.path(), example()));
  CHECK(!write_failure(dir.path(), example()));
  set_file_op_hook(nullptr);
  CHECK(to_json(*read_failure(dir.path())).dump() == to_json(example()).dump());
  CHECK(list_directory(dir.path()) == std::vector<std::string>{failure_file});
  release_failure_space(dir.path());  // nothing left to release
  put_failure_aside(dir.path());
  reserve_failure_space(dir.path());
  reserve_failure_space(dir.path());  // of an attempt that was killed
  release_failure_space(dir.path());
  CHECK(list_directory(dir.path()) == std::vector<std::string>{failures_file});
}

TEST_CASE("a failure.json from anywhere is refused, or put away", "[failure]") {
  const TemporaryDirectory dir;
  const std::string good = to_json(example()).dump();
  for (const std::string& bad : {std::string("{}"), std::string("["), std::string("null"),
                                 std::string(R"({"kind": 3})"), good.substr(0, good.size() - 1)}) {
    std::ofstream(dir / failure_file, std::ios::trunc) << bad;
    CHECK(error_of([&] { read_failure(dir.path()); }).code == 65);
  }
  for (int i = 0; i < test::fuzz_iterations() / 20; ++i) {
    std::ofstream(dir / failure_file, std::ios::trunc) << test::mutated(good, static_cast<uint64_t>(i));
    const int code = error_of([&] { read_failure(dir.path()); }).code;
    REQUIRE((code == 0 || code == 65));
  }
  std::ofstream(dir / failure_file, std::ios::trunc) << "{";
  put_failure_aside(dir.path());
  CHECK(list_directory(dir.path()).empty());
}

TEST_CASE("lost ranks, files and memory may go better the next time, a configuration does not", "[failure]") {
  CHECK(is_retryable(Exit::peer_lost));
  CHECK(is_retryable(Exit::io));
  CHECK(is_retryable(Exit::silent_corruption));
  CHECK(kind_of(Exit::silent_corruption) == "silent_corruption");
  CHECK(!is_retryable(Exit::config));
  CHECK(!is_retryable(Exit::diverged));
  CHECK(kind_of(Exit::out_of_memory) == "out_of_memory");
}
