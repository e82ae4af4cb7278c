#include "apps/monitor/metrics.h"

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/durability.h"
#include "tests/monitor/sample.h"

using namespace nrl;
using namespace nrl::monitor;

namespace {

class TempDir {
 public:
  TempDir() {
    char name[] = "/tmp/nrl-metrics-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~TempDir() { remove_tree(path_); }
  const std::string& path() const { return path_; }
  std::string file() const { return join_path(path_, "metrics.jsonl"); }
  std::string text() const { return read_file(file(), 1 << 28); }

 private:
  std::string path_;
};

StepFacts at_step(int64_t step) {
  StepFacts f = sample_step();
  f.step = step;
  return f;
}

std::vector<int64_t> steps_in(const std::string& text) {
  std::vector<int64_t> steps;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    REQUIRE(end != std::string::npos);
    steps.push_back(parse_json(text.substr(begin, end - begin), "metrics").get_int("step"));
    begin = end + 1;
  }
  return steps;
}

}  // namespace

TEST_CASE("a step's row", "[report]") {
  REQUIRE(
      step_row(sample_step()).dump() ==
      R"({"step":120,"time":1700017949.25,"loss":6.231,"grad_norm":0.842,"lr":0.000171,)"
      R"("tokens":62914560,"tokens_per_s":412300.0,"mfu":0.47,"step_ms":1272.0,"data_ms":4.0,)"
      R"("comm_ms":83.0,"gemm_ms":910.0,"attention_ms":120.5,"skipped":false,"mem_params_bytes":2469606195,"mem_grads_bytes":2469606195})");
  StepFacts f = sample_step();
  f.mfu.reset();
  f.loss = NAN;
  f.skipped = true;
  const JsonValue row = step_row(f);
  REQUIRE(row.at("mfu").is_null());
  REQUIRE(row.dump().find("\"loss\":null") != std::string::npos);
  REQUIRE(row.get_bool("skipped"));
  f.time = 0;
  REQUIRE(step_row(f).get_double("time") > 1.6e9);
}

TEST_CASE("doubles read back to the same bits", "[report]") {
  StepFacts f = sample_step();
  f.loss = 0.1 + 0.2;
  f.lr = 1.0 / 3e5;
  f.grad_norm = 5e-324;
  const JsonValue row = parse_json(step_row(f).dump(), "row");
  REQUIRE(row.get_double("loss") == 0.1 + 0.2);
  REQUIRE(row.get_double("lr") == 1.0 / 3e5);
  REQUIRE(row.get_double("grad_norm") == 5e-324);
}

TEST_CASE("an evaluation's row", "[report]") {
  REQUIRE(eval_row({144, 1700017949.25, {{"val_loss", 6.0021}, {"val_loss/code", 5.5}}, 4.1}).dump() ==
          R"({"step":144,"time":1700017949.25,"val_loss":6.0021,"val_loss/code":5.5,"eval_s":4.1})");
}

TEST_CASE("rows are in the file as soon as they are written", "[report]") {
  TempDir dir;
  MetricsLog log(join_path(dir.path(), "a/b"), 0);
  log.step(at_step(1));
  log.eval({1, 0, {{"val_loss", 2.0}}, 1.0});
  REQUIRE(steps_in(read_file(log.path(), 1 << 20)) == std::vector<int64_t>{1, 1});
}

TEST_CASE("resuming removes the rows of later steps", "[report]") {
  TempDir dir;
  {
    MetricsLog log(dir.path(), 0);
    CHECK(log.kept_ms() == 0);
    for (int64_t step = 1; step <= 9; ++step) {
      log.step(at_step(step));
      if (step % 3 == 0) log.eval({step, 0, {{"val_loss", 2.0}}, 1.0});
    }
  }
  const std::string before = dir.text();
  {
    MetricsLog log(dir.path(), 6);
    CHECK(log.kept_ms() == 6 * sample_step().step_ms);
    const std::string kept = dir.text();
    REQUIRE(before.starts_with(kept));
    REQUIRE(steps_in(kept) == std::vector<int64_t>{1, 2, 3, 3, 4, 5, 6, 6});
    log.step(at_step(7));
  }
  REQUIRE(steps_in(dir.text()) == std::vector<int64_t>{1, 2, 3, 3, 4, 5, 6, 6, 7});
  REQUIRE(list_directory(dir.path()) == std::vector<std::string>{"metrics.jsonl"});
  MetricsLog(dir.path(), 7);
  REQUIRE(steps_in(dir.text()).size() == 9);
  MetricsLog fresh(dir.path(), 0);
  REQUIRE(dir.text().empty());
}

TEST_CASE("later rows in the middle are removed as well", "[report]") {
  TempDir dir;
  write_file_atomic(dir.file(), "{\"step\":1}\n{\"step\":9}\n{\"step\":2}\n{\"step\": 8}\n{\"step\":3}\n");
  MetricsLog log(dir.path(), 3);
  REQUIRE(dir.text() == "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
}

TEST_CASE("a long file is cut at the right place", "[report]") {
  TempDir dir;
  std::string text;
  size_t cut = 0;
  for (int64_t step = 1; step <= 12000; ++step) {
    text += step_row(at_step(step)).dump() + "\n";
    if (step == 11111) cut = text.size();
  }
  REQUIRE(text.size() > 2 << 20);  // several reads
  write_file_atomic(dir.file(), text);
  MetricsLog log(dir.path(), 11111);
  REQUIRE(dir.text() == text.substr(0, cut));
}

TEST_CASE("a broken last line is dropped", "[report]") {
  for (const std::string& tail :
       {std::string("{\"step\":3,\"lo"), std::string("{\"step\":3}"), std::string(2 << 20, '\0'),
        std::string("{\"step\":3,\"lo\n"), std::string("\n"), std::string("[3]\n"),
        std::string("{\"step\":\"3\"}\n"), std::string("\xff\xfe\n")}) {
    TempDir dir;
    write_file_atomic(dir.file(), "{\"step\":1}\n{\"step\":2}\n" + tail);
    MetricsLog log(dir.path(), 5);
    REQUIRE(dir.text() == "{\"step\":1}\n{\"step\":2}\n");
  }
}

TEST_CASE("a broken line in the middle is an error with its place", "[report]") {
  for (const std::string& bad : {std::string("{\"step\":2,\n"), std::string("{\"loss\":2}\n"),
                                 std::string((1 << 20) + 5, 'x') + "\n", std::string(3 << 20, 'x') + "\n"}) {
    TempDir dir;
    write_file_atomic(dir.file(), "{\"step\":1}\n" + bad + "{\"step\":3}\n");
    const std::string before = dir.text();
    try {
      MetricsLog log(dir.path(), 5);
      FAIL("accepted");
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::data);
      REQUIRE(std::string(e.what()).find("metrics.jsonl:2") != std::string::npos);
    }
    REQUIRE(dir.text() == before);
  }
}

TEST_CASE("a crash takes the last rows at most, and none of those before the resume", "[report]") {
  TempDir dir;
  std::string old_rows;
  for (int64_t step = 1; step <= 9; ++step) old_rows += step_row(at_step(step)).dump() + "\n";
  write_file_atomic(dir.file(), old_rows);
  test::Recorder recorder(dir.path());
  MetricsLog log(dir.path(), 6);
  recorder.promise();
  for (int64_t step = 7; step <= 8; ++step) log.step(at_step(step));
  recorder.stop();
  bool lost = false;
  recorder.for_each_crash([&](const std::string& left, bool promised, const std::string& what) {
    CAPTURE(what);
    const MetricsLog again(left, 100);
    const std::vector<int64_t> steps = steps_in(read_file(again.path(), 1 << 20));
    const std::vector<int64_t> all{1, 2, 3, 4, 5, 6, 7, 8, 9};
    const size_t count = steps.size();
    CHECK(steps == std::vector<int64_t>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count)));
    CHECK((promised ? count >= 6 && count <= 8 : count == 9 || count == 6));
    lost = lost || count == 7;
  });
  CHECK(lost);
}

TEST_CASE("an empty file and other ranks", "[report]") {
  TempDir dir;
  write_file_atomic(dir.file(), "");
  { MetricsLog log(dir.path(), 5); }
  REQUIRE(dir.text().empty());
  MetricsLog idle(join_path(dir.path(), "other"), 0, false);
  idle.step(at_step(1));
  REQUIRE_FALSE(path_exists(join_path(dir.path(), "other")));
}

TEST_CASE("a directory that cannot be written is an error", "[report]") {
  TempDir dir;
  write_file_atomic(join_path(dir.path(), "file"), "x");
  REQUIRE_THROWS_AS(MetricsLog(join_path(dir.path(), "file"), 0), Error);
  make_directory(dir.file());
  REQUIRE_THROWS_AS(MetricsLog(dir.path(), 0), Error);
}

TEST_CASE("a full disk is reported once, leaves whole lines, and loses none if it gets room", "[report]") {
  const bool room = GENERATE(false, true);
  TempDir dir;
  // The limit on the file's size stands for the disk; in a child, because it holds for the whole process.
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    MetricsLog log(dir.path(), 0);
    const struct rlimit limit = {1000, RLIM_INFINITY}, none = {RLIM_INFINITY, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int errors = 0;
    for (int64_t step = 1; step <= 10; ++step) {
      if (room && step == 9) ::setrlimit(RLIMIT_FSIZE, &none);
      try {
        log.step(at_step(step));
      } catch (const Error& e) {
        errors += e.code() == Exit::io ? 1 : 100;
      }
    }
    ::_exit(errors);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 1);
  std::vector<int64_t> steps(room ? 10 : 3);
  std::iota(steps.begin(), steps.end(), 1);
  REQUIRE(steps_in(dir.text()) == steps);
}
