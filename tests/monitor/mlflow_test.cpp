#include "apps/monitor/mlflow.h"

#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sink_run.h"

using namespace nrl;
using test::contains;
using test::sample_row;
using test::sample_run;

namespace {

// The directory of the only run of the experiment `id`.
std::string run_in(const test::TemporaryDirectory& dir, const std::string& id) {
  return dir / id + "/0a1b2c3d";
}
std::string text_of(const std::string& run, const std::string& name) {
  return read_file(join_path(run, name), 1 << 20);
}

}  // namespace

TEST_CASE("a file store has the run, its metrics, parameters and texts", "[sinks][mlflow]") {
  const test::TemporaryDirectory dir;
  MlflowConfig config;
  config.run_name = "it's \"n\"";
  const auto sink = monitor::mlflow_sink(dir.path(), config, sample_run());
  const std::string run = run_in(dir, "0");
  CHECK(contains(text_of(run, "meta.yaml"), "\nstatus: 1\n"));
  for (int64_t step = 1; step <= 3; ++step) sink->row(sample_row(step));
  sink->text(3, 0, "sample", "once upon");
  sink->flush();
  CHECK(text_of(run, "metrics/train/loss") ==
        "1700017951000 7.984375 1\n1700017952000 7.96875 2\n1700017953000 7.953125 3\n");
  CHECK(text_of(run, "metrics/train/grad_norm") ==
        "1700017951000 0.25 1\n1700017952000 0.5 2\n1700017953000 nan 3\n");
  CHECK(text_of(run, "params/policy.optimizer.lr") == "3e-04");
  CHECK(text_of(run, "tags/mlflow.runName") == "it's \"n\"");
  CHECK(text_of(run, "artifacts/sample/step-00000003.txt") == "once upon");
  sink->close(3, 1700017960.5, 0);
  const std::string meta = text_of(run, "meta.yaml");
  CHECK(contains(meta, "\nstatus: 3\n"));
  CHECK(contains(meta, "end_time: 1700017960500\n"));
  CHECK(contains(meta, "start_time: 1700017949250\n"));
  CHECK(contains(meta, "run_name: \"it's \\\"n\\\"\"\n"));
  CHECK(contains(text_of(dir / "0", "meta.yaml"), "name: \"Default\"\n"));
  CHECK(contains(sink->next(), "mlflow migrate-filestore --source " + dir.path()));
}

TEST_CASE("the end of a run has MLflow's status", "[sinks][mlflow]") {
  for (const auto& [exit, status] : {std::pair{0, 3}, {75, 5}, {79, 4}}) {
    const test::TemporaryDirectory dir;
    const auto sink = monitor::mlflow_sink(dir.path(), {}, sample_run());
    sink->close(1, 1, exit);
    CHECK(contains(text_of(run_in(dir, "0"), "meta.yaml"), fmt::format("\nstatus: {}\n", status)));
  }
}

TEST_CASE("an experiment is found by its name", "[sinks][mlflow]") {
  const test::TemporaryDirectory dir;
  MlflowConfig config;
  config.experiment_name = "a b";
  for (const char* name : {"a b", "'a b'", "\"a b\""}) {  // as MLflow may have written it
    const test::TemporaryDirectory store;
    make_directory(store / "42");
    write_file_atomic(store / "42/meta.yaml", fmt::format("experiment_id: '42'\nname: {}\n", name));
    monitor::mlflow_sink(store.path(), config, sample_run());
    CHECK(path_exists(run_in(store, "42")));
    CHECK(list_directory(store.path()).size() == 1);
  }
  monitor::mlflow_sink(dir.path(), config, sample_run());
  const std::vector<std::string> made = list_directory(dir.path());
  REQUIRE(made.size() == 1);
  CHECK(made[0].size() == 18);
  monitor::mlflow_sink(dir.path(), config, sample_run(1));
  CHECK(list_directory(dir.path()) == made);
}

TEST_CASE("a resumed session removes superseded metrics and keeps the run", "[sinks][mlflow]") {
  const test::TemporaryDirectory dir;
  const std::string loss = join_path(run_in(dir, "0"), "metrics/train/loss");
  {
    const auto sink = monitor::mlflow_sink(dir.path(), {}, sample_run());
    for (int64_t step = 1; step <= 5; ++step) sink->row(sample_row(step));
    sink->flush();
  }
  const std::string all = read_file(loss, 1 << 20);
  write_file_atomic(loss, all + "17000179");  // of a kill
  {
    const auto sink = monitor::mlflow_sink(dir.path(), {}, sample_run(3));
    CHECK(read_file(loss, 1 << 20) ==
          "1700017951000 7.984375 1\n1700017952000 7.96875 2\n1700017953000 7.953125 3\n");
    sink->row(sample_row(4));
    sink->row(sample_row(5));
    sink->flush();
  }
  CHECK(read_file(loss, 1 << 20) == all);
  // A run that was killed before its first checkpoint repeats everything.
  monitor::mlflow_sink(dir.path(), {}, sample_run(0));
  CHECK(read_file(loss, 1 << 20).empty());
}

TEST_CASE("malformed metrics are refused with their place", "[sinks][mlflow]") {
  for (const char* bad : {"x\n", "1 2\n", "1 2 \n", "1 2 3x\n", "1 2 -4\n", "\n"}) {
    CAPTURE(bad);
    const test::TemporaryDirectory dir;
    monitor::mlflow_sink(dir.path(), {}, sample_run());
    const std::string path = join_path(run_in(dir, "0"), "metrics/loss");
    write_file_atomic(path, std::string("1 0.5 1\n") + bad + "1 0.5 3\n");
    const test::Caught error = test::error_of([&] { monitor::mlflow_sink(dir.path(), {}, sample_run(3)); });
    CHECK(error.code == static_cast<int>(Exit::data));
    CHECK(contains(error.text, "metrics/loss:2: "));
  }
  const test::TemporaryDirectory dir;
  make_directory(dir / "7");
  for (int i = 0; i < test::fuzz_iterations() / 100; ++i) {  // nothing but errors
    write_file_atomic(dir / "7/meta.yaml",
                      test::mutated("experiment_id: '7'\nname: \"Def\\\"ault\"\n", static_cast<uint64_t>(i)));
    const test::Caught error = test::error_of([&] { monitor::mlflow_sink(dir.path(), {}, sample_run()); });
    CHECK((error.code == 0 || error.code == static_cast<int>(Exit::data)));
  }
}

TEST_CASE("a removed store and a full disk are errors", "[sinks][mlflow]") {
  const test::TemporaryDirectory dir;
  const auto sink = monitor::mlflow_sink(dir / "m", {}, sample_run());
  sink->row(sample_row(1));
  sink->flush();
  remove_tree(dir / "m");
  sink->row(sample_row(2));
  CHECK(contains(test::error_of([&] { sink->flush(); }).text, "was removed"));
  CHECK(!path_exists(dir / "m"));
  CHECK(test::fails_on_full_disk(1000, [&] {
    const auto full = monitor::mlflow_sink(dir / "full", {}, sample_run());
    for (int64_t step = 1; step <= 100; ++step) {
      full->row(sample_row(step));
      full->flush();
    }
  }));
}

TEST_CASE("a file store is named by its directory", "[sinks][mlflow]") {
  CHECK(monitor::mlflow_directory("file:///a/b") == "/a/b");
  CHECK(monitor::mlflow_directory("a/b") == "a/b");
}
