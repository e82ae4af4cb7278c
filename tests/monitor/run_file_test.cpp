#include "apps/monitor/run_file.h"

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::monitor;
using test::TemporaryDirectory;

TEST_CASE("a job that is started again is one run", "[run_file]") {
  const TemporaryDirectory dir;
  make_directories(dir / "tiny/logs");
  const std::string logs = dir / "tiny/logs";
  RunFile first = begin_session(logs, 0, 100);
  CHECK(first.run_id.size() == 8);
  CHECK(first.name == "tiny");
  CHECK(first.created == 100);
  end_session(logs, first, 50, 160, 75);
  const RunFile second = begin_session(logs, 50, 200);  // killed
  CHECK(second.run_id == first.run_id);
  RunFile third = begin_session(logs, 50, 300);
  end_session(logs, third, 90, 340, 0);
  const RunFile read = run_file_from(read_json(join_path(logs, run_file)), "run.json");
  CHECK(read.run_id == first.run_id);
  CHECK(read.created == 100);
  REQUIRE(read.sessions.size() == 3);
  CHECK(read.sessions[0].end == 160);
  CHECK(read.sessions[0].last_step == 50);
  CHECK(read.sessions[0].exit == 75);
  CHECK(!read.sessions[1].end);
  CHECK(!read.sessions[1].exit);
  CHECK(read.sessions[2].first_step == 50);
  CHECK(to_json(read).dump() == to_json(third).dump());
}

TEST_CASE("a start from step 0 continues a killed run only", "[run_file]") {
  const TemporaryDirectory dir;
  RunFile run = begin_session(dir.path(), 0, 1);
  RunFile again = begin_session(dir.path(), 0, 2);
  CHECK(again.run_id == run.run_id);
  CHECK(again.sessions.size() == 2);
  end_session(dir.path(), again, 4, 3, 0);
  const RunFile fresh = begin_session(dir.path(), 0, 4);
  CHECK(fresh.run_id != run.run_id);
  CHECK(fresh.sessions.size() == 1);
  CHECK(fresh.created == 4);
}

TEST_CASE("a supervisor names the run and its attempt", "[run_file]") {
  const TemporaryDirectory dir;
  RunFile run = begin_session(dir.path(), 0, 1, {"0a1b", 3});
  CHECK(run.run_id == "0a1b");
  CHECK(run.attempt() == 3);
  CHECK(begin_session(dir.path(), 0, 2).attempt() == 4);
  run = begin_session(dir.path(), 0, 3, {"ffff", 2});  // the run of the file, which was killed
  CHECK(run.run_id == "0a1b");
  CHECK(run.attempt() == 5);
  end_session(dir.path(), run, 4, 4, 0);
  // A new run has a new id, and an attempt number that its supervisor has not used.
  run = begin_session(dir.path(), 0, 5, {"0a1b", 6});
  CHECK(run.run_id != "0a1b");
  CHECK(run.attempt() == 6);
  const std::string file = dir / run_file;
  const std::string old =
      R"({"run_id": "0a", "name": "n", "created": 1, "sessions": [{"start": 1, "end": null,)"
      R"( "first_step": 0}, {"start": 2, "end": null, "first_step": 0}]})";
  write_file_atomic(file, old);
  CHECK(read_run_file(dir.path()).attempt() == 2);
}

TEST_CASE("a malformed run.json is refused", "[run_file]") {
  const TemporaryDirectory dir;
  RunFile run = begin_session(dir.path(), 0, 1);
  end_session(dir.path(), run, 4, 3, 0);
  const std::string path = dir / run_file, good = read_file(path, 1 << 20);
  const auto refused = [&](const std::string& text) {
    write_file_atomic(path, text);
    const test::Caught error = test::error_of([&] { begin_session(dir.path(), 4, 5); });
    CHECK(error.code == static_cast<int>(Exit::data));
    CHECK(test::contains(error.text, run_file));
    return error.text;
  };
  CHECK(test::contains(refused("{}"), "Fix: remove the file"));
  refused("");
  refused(good.substr(0, good.size() / 2));
  refused(
      R"({"run_id": "../x", "name": "n", "created": 1, "sessions": [{"start": 1, "end": null, "first_step": 0}]})");
  refused(R"({"run_id": "0a", "name": "n", "created": 1, "sessions": []})");
  refused(
      R"({"run_id": "0a", "name": "n", "created": 1, "sessions": [{"start": 1, "end": 2, "first_step": 0}]})");
  refused(
      R"({"run_id": "0a", "name": "n", "created": 1, "sessions": [{"attempt": 0, "start": 1, "end": null, "first_step": 0}]})");
  for (int i = 0; i < test::fuzz_iterations() / 20; ++i) {
    const std::string bad = test::mutated(good, static_cast<uint64_t>(i));
    const test::Caught error =
        test::error_of([&] { run_file_from(parse_json(bad, "run.json"), "run.json"); });
    CHECK((error.code == 0 || error.code == static_cast<int>(Exit::data)));
  }
}
