// Saved checkpoints: which are kept, how they are read back and given to a command; saves and stops on
// request.

#include <string>
#include <vector>

#include "core/io/checkpoint_store.h"
#include "tests/train/training_run.h"

using namespace nrl;
using test::contains;
using test::Finished;

namespace {

std::vector<std::string> steps_in(const std::string& store) {
  std::vector<std::string> out;
  for (const std::string& name : list_directory(store))
    if (name.starts_with("step-")) out.push_back(name);
  return out;
}

}  // namespace

TEST_CASE("keep_every keeps more than the newest, and the newest verified checkpoint stays") {
  const test::Workbench bench;
  const std::string store = bench / "run/checkpoints";
  const Finished run = bench.run("run", {"loop.max_num_steps=7", "checkpointing.save_period=1",
                                         "checkpointing.keep_latest_k=1", "checkpointing.keep_every=3"});
  REQUIRE(run.code == Exit::ok);
  CHECK(steps_in(store) == std::vector<std::string>{"step-3", "step-6", "step-7"});
  CHECK(path_exists(store + "/step-7/VERIFIED"));
  CHECK(validate_checkpoint(store + "/step-7", Validation::full).empty());
  CHECK(bench.run("run", {"loop.max_num_steps=8"}).code == Exit::ok);  // resumes from it
}

TEST_CASE("checkpointing.after_save gets each checkpoint, and its failure is a warning") {
  const test::Workbench bench;
  const std::string copy =
      "checkpointing.after_save=[sh, -c, 'echo \"got $0\"; cp -r \"$0\" " + bench / "copy" + "']";
  const Finished run = bench.run("run", {copy});
  REQUIRE(run.code == Exit::ok);
  CHECK(run.err.empty());
  CHECK(validate_checkpoint(bench / "copy", Validation::full).empty());
  CHECK(contains(bench.read("run/logs/after-save.log"), "got " + bench / "run/checkpoints/step-4"));

  const Finished fails = bench.run("fails", {"checkpointing.after_save=[sh, -c, 'exit 3']"});
  CHECK(fails.code == Exit::ok);
  CHECK(contains(fails.err, "checkpointing.after_save of step 4: exit status 3; its output is in "));
  const Finished none = bench.run("none", {"checkpointing.after_save=no-such-program"});
  CHECK(none.code == Exit::ok);
  CHECK(contains(none.err, "cannot start no-such-program: No such file or directory"));
}

TEST_CASE("a checkpoint that is damaged on disk is reported") {
  const test::Workbench bench;
  REQUIRE(bench.run("run").code == Exit::ok);
  const std::string path = bench / "run/checkpoints/step-4";
  remove_tree(path + "/VERIFIED");
  CHECK(verify_saved(path).empty());
  CHECK(path_exists(path + "/VERIFIED"));
  remove_tree(path + "/VERIFIED");
  CHECK(verify_saved(path, [] { return true; }).empty());  // told to stop
  CHECK_FALSE(path_exists(path + "/VERIFIED"));
  const std::string file = path + "/model.safetensors";
  std::string bytes = read_file(file, 1 << 24);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  std::ofstream(file, std::ios::binary) << bytes;
  const std::vector<std::string> problems = verify_saved(path);
  REQUIRE(problems.size() == 1);
  CHECK(contains(problems[0], "model.safetensors"));
  CHECK_FALSE(path_exists(path + "/VERIFIED"));
}

TEST_CASE("a checkpoint is saved every save_seconds, and a run stops to have its own in time") {
  const test::Workbench bench;
  const Finished timed =
      bench.run("timed", {"loop.max_num_steps=100000", "checkpointing.save_seconds=1",
                          "checkpointing.checkpoint_must_save_by=3", "logger.log_interval=1000"});
  CHECK(timed.code == Exit::stopped);
  CHECK(steps_in(bench / "timed/checkpoints").size() >= 2);
  CHECK(contains(timed.out, "exit 75"));
}
