#include "apps/launch/state.h"

#include <unistd.h>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::launch;
using test::error_of;
using test::TemporaryDirectory;

namespace {

LaunchState example() {
  LaunchState s{.run_id = "0a1b2c3d",
                .attempt = 3,
                .running = true,
                .restarts = 2,
                .hosts = {"node0", "node2"},
                .spares = {"node3"},
                .retired = {"node1", "node4"},
                .barred = {"node4"}};
  s.history = {{.attempt = 1,
                .code = 80,
                .kind = "node_lost",
                .host = "node1",
                .rank = 2,
                .step = 37,
                .saved = 30,
                .progress = true,
                .time = 1000.5},
               {.attempt = 2, .code = 137, .kind = "unknown", .saved = 30, .time = 1100}};
  return s;
}

}  // namespace

TEST_CASE("launch.json is read back", "[launch]") {
  const TemporaryDirectory dir;
  CHECK(!read_state(dir.path()));
  write_state(dir.path(), example());
  CHECK(to_json(*read_state(dir.path())).dump() == to_json(example()).dump());
  LaunchState none{.run_id = "0a"};
  write_state(dir.path(), none);
  CHECK(to_json(*read_state(dir.path())).dump() == to_json(none).dump());
  // Hosts that an earlier version has retired stay so.
  std::string old = to_json(example()).dump();
  const std::string barred = R"(,"barred":["node4"])";
  REQUIRE(old.find(barred) != old.npos);
  write_file_atomic(dir / state_file, old.replace(old.find(barred), barred.size(), ""), Durable::no);
  CHECK(read_state(dir.path())->barred == example().retired);
  // A year of restarts is cut.
  LaunchState many = example();
  for (int i = 0; i < 1000; ++i) many.history.push_back(example().history[0]);
  many.history.push_back({.attempt = 999, .kind = "last"});
  write_state(dir.path(), many);
  CHECK(read_state(dir.path())->history.size() == max_history);
  CHECK(read_state(dir.path())->history.back().kind == "last");
}

TEST_CASE("a launch.json from anywhere is refused", "[launch]") {
  const TemporaryDirectory dir;
  const std::string path = dir / state_file, good = to_json(example()).dump();
  const auto code_of = [&](const std::string& text) {
    write_file_atomic(path, text, Durable::no);
    const test::Caught caught = error_of([&] { read_state(dir.path()); });
    if (caught.code != 0) CHECK(test::contains(caught.text, "Fix: remove the file"));
    return caught.code;
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    REQUIRE(text.find(from) != text.npos);
    return text.replace(text.find(from), from.size(), to);
  };
  REQUIRE(code_of(good) == 0);
  for (const std::string& bad :
       {std::string(), std::string("{}"), std::string("null"), good.substr(0, good.size() / 2),
        replaced("\"format\":1", "\"format\":2"), replaced("0a1b2c3d", "../x"),
        replaced("\"attempt\":3", "\"attempt\":-3"), replaced("\"attempt\":1", "\"attempt\":99999999999"),
        replaced("\"restarts\":2", "\"restarts\":\"2\""), replaced("\"node3\"", "7"),
        replaced("\"rank\":2", "\"rank\":-1")})
    CHECK(code_of(bad) == 65);
  for (int i = 0; i < test::fuzz_iterations() / 20; ++i) {
    const int code = code_of(test::mutated(good, static_cast<uint64_t>(i)));
    REQUIRE((code == 0 || code == 65));
  }
  remove_tree(path);
  REQUIRE(::symlink("/etc/passwd", path.c_str()) == 0);
  CHECK(error_of([&] { read_state(dir.path()); }).code != 0);
}
