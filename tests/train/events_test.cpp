// At which steps a run evaluates, samples, saves, prints and profiles, and what its checkpoints say of its
// position. All expected steps and counts are worked out by hand from the configuration.

#include <regex>

#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Names = std::vector<std::string>;
using Numbers = std::vector<int64_t>;

/// "eval 4": the kind and the step of every line with a time that names a step.
Names events(const std::string& out) {
  static const std::regex line(R"(\d\d:\d\d:\d\d (step|start|eval|text|ckpt|profile) +(\d+)[ /].*)");
  Names found;
  std::istringstream in(out);
  std::smatch match;
  for (std::string text; std::getline(in, text);)
    if (std::regex_match(text, match, line)) found.push_back(match[1].str() + " " + match[2].str());
  return found;
}

/// "4", "4 val", "4 text": what the rows of metrics.jsonl are, in their order.
Names kinds(const Rows& rows) {
  Names out;
  for (const JsonValue& row : rows)
    out.push_back(std::to_string(row.get_int("step")) + (row.contains("val_loss") ? " val"
                                                         : row.contains("text")   ? " text"
                                                                                  : ""));
  return out;
}

/// How often a range was recorded in the window of rank 0 that begins with `step`.
int64_t recorded(const Workbench& bench, const std::string& run, int64_t step, std::string_view range) {
  const JsonValue trace = parse_json(
      bench.read(fmt::format("{}/logs/profile/step-{}/chrome/rank-0.pt.trace.json", run, step)), "trace");
  int64_t count = 0;
  for (const JsonValue& event : trace.at("traceEvents").items())
    count += event.get_string("name", "") == range && event.get_string("ph", "") == "X";
  return count;
}

void check_position(const JsonValue& at, int64_t step, int64_t skipped, double best_val_loss,
                    int64_t best_val_step) {
  CHECK(at.get_int("step") == step);
  CHECK(at.get_int("updates") == step - skipped);
  CHECK(at.get_int("skipped") == skipped);
  CHECK(at.get_int("consumed_samples") == step * 4);  // the global batch
  CHECK(at.get_int("tokens") == step * 4 * 8);        // of 8 tokens each
  CHECK(at.get_int("global_batch") == 4);
  CHECK(at.get_double("best_val_loss") == best_val_loss);
  CHECK(at.get_int("best_val_step") == best_val_step);
}

}  // namespace

TEST_CASE("every event of a run comes at its step, and a resumed run continues the sequence") {
  Workbench bench;
  bench.write_tokens("validation", Workbench::random_tokens(200, 2));
  const std::vector<std::string> keys{"data.validation.data_path=" + bench / "validation",
                                      "pretrain.val_period=4",
                                      "pretrain.val_batches=3",
                                      "pretrain.val_at_start=true",
                                      "pretrain.val_at_end=true",
                                      "checkpointing.save_period=3",
                                      "checkpointing.keep_latest_k=2",
                                      "checkpointing.is_async=false",
                                      "logger.sample_period=5",
                                      "logger.sample_tokens=2",
                                      "policy.tokenizer.name=bytes",
                                      "logger.log_interval=6",
                                      "policy.optimizer.lr=0.1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), keys.begin(), keys.end());
    return more;
  };
  const Finished first = bench.run("run", with({"pretrain.max_num_steps=11", "profiling.enabled=true",
                                                "profiling.steps=4:7", "profiling.trace=chrome"}));
  INFO(first.err);
  REQUIRE(first.code == Exit::ok);
  // Lines of steps: the first, every sixth, the last. A step has its line, trace, evaluation, sample, save.
  CHECK(events(first.out) == Names{"eval 0", "step 1", "start 1", "ckpt 3", "profile 4", "eval 4",
                                   "profile 5", "text 5", "step 6", "profile 6", "ckpt 6", "eval 8", "ckpt 9",
                                   "text 10", "step 11", "eval 11", "text 11", "ckpt 11"});
  CHECK(contains(first.out, "done: 11 steps"));
  CHECK(kinds(bench.rows("run")) == Names{"0 val", "1", "2", "3", "4", "4 val", "5", "5 text", "6", "7", "8",
                                          "8 val", "9", "10", "10 text", "11", "11 val", "11 text"});
  for (const JsonValue& row : bench.steps("run")) {
    CHECK(row.get_int("tokens") == row.get_int("step") * 32);
    CHECK_FALSE(row.get_bool("skipped"));
  }
  // Steps 4, 5 and 6 of two microbatches, without what is between them.
  for (const int64_t step : {4, 5, 6}) {
    CHECK(recorded(bench, "run", step, "optimizer_step") == 1);
    CHECK(recorded(bench, "run", step, "backward_pass") == 2);
    CHECK(recorded(bench, "run", step, fmt::format("ProfilerStep#{}", step)) == 1);
    CHECK(recorded(bench, "run", step, "epoch_1") == 1);
  }

  // The kernels of steps before the trace count as well; with all steps traced, those of the trace.
  const Finished traced = bench.run("traced", {"pretrain.max_num_steps=2", "profiling.enabled=true",
                                               "profiling.steps=1:3", "checkpointing.enabled=false"});
  INFO(traced.out);
  CHECK(contains(traced.out, "kernels     "));

  CHECK(bench.checkpoints("run") == Names{"LATEST", "step-11", "step-9"});
  CHECK(bench.read("run/checkpoints/LATEST") == "step-11\n");
  std::vector<double> losses;
  for (const JsonValue& row : bench.rows("run"))
    if (row.contains("val_loss")) losses.push_back(row.get_double("val_loss"));
  const auto best = std::min_element(losses.begin(), losses.end());
  const int64_t evaluated[] = {0, 4, 8, 11};
  const int64_t best_step = evaluated[best - losses.begin()];
  REQUIRE(best_step < 8);  // so that the best one is neither the last of step 9 nor of step 11
  check_position(bench.position("run", 9), 9, 0, *best, best_step);
  check_position(bench.position("run", 11), 11, 0, *best, best_step);
  CHECK(bench.position("run", 11).get_int("dataset_samples") == 44);

  const Finished second = bench.run("run", with({"pretrain.max_num_steps=14"}));
  INFO(second.err);
  REQUIRE(second.code == Exit::ok);
  CHECK(events(second.out) ==
        Names{"step 12", "start 12", "eval 12", "ckpt 12", "step 14", "eval 14", "text 14", "ckpt 14"});
  CHECK(bench.step_numbers("run") == Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  CHECK(bench.steps("run").back().get_int("tokens") == 14 * 32);
  CHECK(bench.checkpoints("run") == Names{"LATEST", "step-12", "step-14"});
  CHECK(bench.read("run/checkpoints/LATEST") == "step-14\n");
  check_position(bench.position("run", 14), 14, 0, *best, best_step);
  CHECK(contains(second.out, fmt::format("best {:.4f} at step {}", *best, best_step)));
  CHECK(contains(second.out, "steps       3 of 14"));
  CHECK(contains(second.out, "tokens      96"));

  // Back to an older checkpoint: its rows are made again, once; what is newer is set aside.
  const Finished third = bench.run(
      "run",
      with({"pretrain.max_num_steps=13", "checkpointing.resume=" + bench / "run/checkpoints/step-12"}));
  INFO(third.err);
  REQUIRE(third.code == Exit::ok);
  CHECK(events(third.out) == Names{"step 13", "start 13", "eval 13", "text 13", "ckpt 13"});
  CHECK(bench.step_numbers("run") == Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13});
  CHECK(bench.checkpoints("run") == Names{"LATEST", "previous-1", "step-12", "step-13"});
  CHECK(bench.read("run/checkpoints/LATEST") == "step-13\n");
}

TEST_CASE("saves: period 0 and none at all, how many are kept, and a run of no steps") {
  const Workbench bench;
  const auto kept = [&](const std::string& name, std::vector<std::string> keys) {
    keys.emplace_back("pretrain.max_num_steps=5");
    CHECK(bench.run(name, keys).code == Exit::ok);
    return bench.checkpoints(name);
  };
  CHECK(kept("end", {}) == Names{"LATEST", "step-5"});
  CHECK(kept("all", {"checkpointing.save_period=1", "checkpointing.keep_latest_k=null"}) ==
        Names{"LATEST", "step-1", "step-2", "step-3", "step-4", "step-5"});
  CHECK(kept("one", {"checkpointing.save_period=2", "checkpointing.keep_latest_k=1"}) ==
        Names{"LATEST", "step-5"});
  CHECK(kept("none", {"checkpointing.save_period=2", "checkpointing.enabled=false"}).empty());

  // What a killed run left of its files goes with the next one.
  const std::string nonce = random_nonce();
  for (const std::string file :
       {"config.yaml", "metrics.jsonl", "memory.json", "communication.json", "notes"})
    write_file_atomic(bench / ("none/logs/" + file + ".tmp-" + nonce), "half a file");
  write_file_atomic(bench / "none/logs/config.yaml.tmp-mine", "not ours");
  CHECK(bench.run("none", {"checkpointing.enabled=false"}).code == Exit::ok);
  CHECK(list_directory(bench / "none/logs") == Names{"config.yaml", "config.yaml.tmp-mine", "memory.json",
                                                     "metrics.jsonl", "notes.tmp-" + nonce, "run.json",
                                                     "summary.json"});

  const Finished initial = bench.run("initial", {"pretrain.max_num_steps=0"});
  CHECK(initial.code == Exit::ok);
  CHECK(bench.checkpoints("initial") == Names{"LATEST", "step-0"});
  CHECK(bench.rows("initial").empty());
  check_position(bench.position("initial", 0), 0, 0, 0, 0);
  CHECK(initial.out.find(" step ") == std::string::npos);

  const Finished again = bench.run("end", {"pretrain.max_num_steps=5"});
  CHECK(again.code == Exit::ok);
  CHECK(contains(again.out, "nothing to do: the checkpoint is at step 5 of 5"));
  CHECK(bench.step_numbers("end") == Numbers{1, 2, 3, 4, 5});
}

TEST_CASE("the last step follows from steps, epochs and the size of the data") {
  const Workbench bench;
  // 185 tokens: 23 samples of 8 tokens and one more to predict; 184 tokens: 22. Four samples a step.
  bench.write_tokens("samples23", Workbench::random_tokens(185, 3));
  bench.write_tokens("samples22", Workbench::random_tokens(184, 3));
  const auto last = [&](const std::string& data, const std::string& epochs, const std::string& steps) {
    const Finished run =
        bench.run("run", {"data.train.data_path=" + bench / data, "pretrain.max_num_epochs=" + epochs,
                          "pretrain.max_num_steps=" + steps, "checkpointing.resume=never"});
    INFO(run.err);
    REQUIRE(run.code == Exit::ok);
    const Numbers numbers = bench.step_numbers("run");
    for (size_t i = 0; i < numbers.size(); ++i) CHECK(numbers[i] == static_cast<int64_t>(i) + 1);
    return numbers.back();
  };
  CHECK(last("samples23", "1", "null") == 5);   // 23 / 4
  CHECK(last("samples23", "3", "null") == 17);  // 69 / 4
  CHECK(last("samples22", "3", "null") == 16);  // 66 / 4
  CHECK(last("samples23", "3", "7") == 7);      // what comes first
  CHECK(last("samples23", "1", "7") == 5);
  const Finished few = bench.run("few", {"data.train.data_path=" + bench / "samples23",
                                         "pretrain.max_num_epochs=1", "policy.train_global_batch_size=24"});
  CHECK(few.code == Exit::config);
  CHECK(contains(few.err, "pretrain.max_num_epochs"));
}
