// Distillation on policy: a student generates and learns from a teacher that scores its tokens, in this
// process.
#include <cmath>
#include <fstream>

#include "apps/plan/generation.h"
#include "apps/state/model_source.h"
#include "apps/train/start/memory_fit.h"
#include "core/base/text.h"
#include "tests/catch.h"
#include "tests/train/digits.h"

using namespace nrl;
using namespace nrl::test;

namespace {

class Teacher : public Digits {
 public:
  /// Has another size than the student, and is trained to write letters.
  Teacher() {
    const Finished finished =
        learn("teacher",
              {"policy.model.hidden_size=32", "policy.model.intermediate_size=48", "policy.optimizer.lr=0.02",
               "loop.max_num_steps=30", "checkpointing.save_period=30", "loop.seed=3"});
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
  }
  std::string directory() const { return *this / "teacher/checkpoints/step-30"; }

  std::vector<std::string> keys(std::vector<std::string> more) const {
    std::vector<std::string> all{"algorithm=distill",
                                 "policy.tokenizer={name: bytes, chat_template: none}",
                                 "policy.max_total_sequence_length=8",
                                 "policy.train_global_batch_size=12",
                                 "policy.train_micro_batch_size=3",
                                 "policy.generation.max_new_tokens=3",
                                 "policy.optimizer.lr=0.02",
                                 "distill.num_prompts_per_step=12",
                                 "distill.num_generations_per_prompt=1",
                                 "distill.topk=16",
                                 "reference.model_name=" + directory(),
                                 "data.train={data_path: " + (*this / "prompts.jsonl") + ", format: prompts}",
                                 "loop.max_num_steps=4"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Finished distill(const std::string& name, std::vector<std::string> more = {}) const {
    return run(name, keys(std::move(more)));
  }
};

}  // namespace

TEST_CASE("a student learns the teacher's distribution at the tokens that it generates", "[distill]") {
  const Teacher bench;
  for (const auto& [name, way] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"forward",
            {"data.validation={data_path: " + (bench / "validation.jsonl") + ", format: prompts}",
             "loop.val_at_start=true", "loop.val_at_end=true", "distill.max_val_samples=7",
             "distill.val_num_generations_per_prompt=3", "policy.generation.val_temperature=1"}},
           {"reverse", {"distill.kl_type=reverse", "distill.zero_outside_topk=true", "distill.topk=272"}}}) {
    CAPTURE(name);
    std::vector<std::string> more = way;
    more.emplace_back("loop.max_num_steps=40");
    const Finished finished = bench.distill(name, more);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    CHECK_THAT(finished.out + finished.err, ContainsSubstring("beside the student: "));
    CHECK_THAT(finished.out + finished.err,
               ContainsSubstring(
                   fmt::format("teacher's numbers of {} completions", name == "forward" ? 12 + 7 * 3 : 12)));
    const std::vector<double> losses = bench.values(name, "loss");
    REQUIRE(losses.size() == 40);
    double first = 0, last = 0;
    for (size_t i = 0; i < 5; ++i) first += losses[i], last += losses[35 + i];
    CHECK(first > 0.1);
    CHECK(last < 0.5 * first);
    const JsonValue row = bench.steps(name).front();
    CHECK(row.contains("teacher_s"));
    CHECK(row.get_double("completion_tokens") >= 1);
    CHECK(!row.contains("reward"));
    CHECK(!row.contains("reward_s"));
    CHECK(!bench.samples(name).front().contains("reward"));
  }
  // The start's check has the numbers of 12 completions and of 7 x 3, which a process on a CPU holds.
  const ConfigResult config = load_config(bench / "forward/logs/config.yaml", {});
  REQUIRE(config.ok());
  const auto plan =
      plan::make_run_plan(config.config, train::load_model_spec(config), resolve_batch(config.config, 1),
                          plan::grid_position(config.config, 1, 0), DeviceType::cpu, 1);
  CHECK(plan::total(train::needed_memory(config.config, *plan)) ==
        plan::total(plan::planned_memory(config.config, *plan)) +
            static_cast<double>(train::reference_bytes(config.config, *plan) +
                                plan::plan_generation(config.config, *plan, 0).memory.total() +
                                33 * 3 * 16 * 8));
  std::vector<double> evaluations;
  for (const JsonValue& row : bench.rows("forward"))
    if (row.contains("val_loss")) evaluations.push_back(row.get_double("val_loss"));
  REQUIRE(evaluations.size() == 2);
  CHECK(evaluations[0] > 0.02);
  CHECK(evaluations[1] < 0.5 * evaluations[0]);
  CHECK(bench.samples("forward").size() == 40 + 2 * 7 * 3);

  // Completions that were cut off are not trained.
  REQUIRE(bench.distill("whole", {"loop.max_num_steps=1"}).code == Exit::ok);
  REQUIRE(bench.distill("filtered", {"loop.max_num_steps=1", "distill.overlong_filtering=true"}).code ==
          Exit::ok);
  CHECK(bench.values("whole", "completion_tokens") == bench.values("filtered", "completion_tokens"));
  CHECK(bench.values("whole", "loss") != bench.values("filtered", "loss"));
}

TEST_CASE("distillation on policy depends neither on restarts nor on layouts", "[distill]") {
  const Teacher bench;
  const std::vector<std::vector<std::string>> ways{
      {"distill.kl_type=mixed"},
      {"distill.zero_outside_topk=true", "policy.train_global_batch_size=6",
       "distill.num_generations_per_prompt=2", "distill.num_prompts_per_step=6"}};
  for (size_t i = 0; i < ways.size(); ++i) {
    CAPTURE(i);
    std::vector<std::string> keys = ways[i];
    keys.emplace_back("checkpointing.save_period=2");
    const std::string whole = fmt::format("whole{}", i), parts = fmt::format("parts{}", i);
    const Finished finished = bench.distill(whole, keys);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    std::vector<std::string> first = keys;
    first.emplace_back("loop.max_num_steps=2");
    REQUIRE(bench.distill(parts, first).code == Exit::ok);
    REQUIRE(bench.distill(parts, keys).code == Exit::ok);
    CHECK(bench.weights(whole, 4) == bench.weights(parts, 4));
    CHECK(bench.values(whole, "loss") == bench.values(parts, "loss"));
    for (const std::string layout :
         {"distributed.shard_strategy=optim", "distributed.tensor_parallel_size=2"}) {
      CAPTURE(layout);
      std::vector<std::string> more = keys;
      more.push_back(layout);
      const std::string two = fmt::format("{}{}", layout.substr(layout.find('.') + 1, 5), i);
      const Finished other = bench.run_ranks(NRL_TWO_RANKS, two, bench.keys(more));
      INFO(other.err);
      REQUIRE(other.code == Exit::ok);
      const std::vector<double> want = bench.values(whole, "loss"), got = bench.values(two, "loss");
      REQUIRE(got.size() == want.size());
      for (size_t s = 0; s < want.size(); ++s) CHECK(got[s] == Approx(want[s]).epsilon(1e-3).margin(1e-6));
    }
  }
}

TEST_CASE("numbers of a teacher that do not fit into the host's memory are refused at the start",
          "[distill]") {
  const Teacher bench;
  // 9.2 TB: 2^26 completions of 63 tokens with 272 ids and logits.
  const Finished finished =
      bench.distill("large", {"policy.max_total_sequence_length=64", "policy.train_global_batch_size=4096",
                              "policy.train_micro_batch_size=64", "policy.generation.max_new_tokens=63",
                              "distill.num_prompts_per_step=65536", "distill.num_generations_per_prompt=1024",
                              "distill.topk=272", "loop.max_num_steps=16384"});
  CHECK(finished.code == Exit::out_of_memory);
  CHECK_THAT(finished.err, ContainsSubstring("distill.num_prompts_per_step: 65536 is too large"));
  CHECK_THAT(finished.err, ContainsSubstring("data 8.37 TiB"));
  CHECK_THAT(finished.err, ContainsSubstring("distill.topk (272)"));

  // All validation prompts, which the start has read: 9.2 TB, of 65,536 x 1,024 completions of 63 tokens.
  {
    std::ofstream prompts(bench / "many.jsonl");
    for (int i = 0; i < 65536; ++i) prompts << "{\"prompt\": \"1\", \"answer\": \"1\"}\n";
  }
  const Finished validated = bench.distill(
      "validated",
      {"data.validation={data_path: " + (bench / "many.jsonl") + ", format: prompts}", "loop.val_at_end=true",
       "distill.val_num_generations_per_prompt=1024", "policy.max_total_sequence_length=64",
       "policy.generation.max_new_tokens=63", "distill.topk=272", "policy.train_micro_batch_size=1"});
  CHECK(validated.code == Exit::out_of_memory);
  CHECK_THAT(validated.err, ContainsSubstring("the teacher's numbers of 67,108,876 completions take up to"));
  CHECK_THAT(validated.err, ContainsSubstring("lower distill.topk, 272 ids"));
  CHECK_THAT(validated.err, ContainsSubstring("distill.max_val_samples"));
}

TEST_CASE("distillation on policy that cannot be done is refused with the reason", "[distill]") {
  const Digits bench;
  const auto refusal = [&](std::vector<std::string> more) {
    std::vector<std::string> keys{
        "algorithm=distill",
        "policy.tokenizer={name: bytes, chat_template: none}",
        "policy.max_total_sequence_length=8",
        "policy.train_global_batch_size=12",
        "distill.num_prompts_per_step=12",
        "distill.num_generations_per_prompt=1",
        "data.train={data_path: " + (bench / "prompts.jsonl") + ", format: prompts}",
        "loop.max_num_steps=4"};
    keys.insert(keys.end(), more.begin(), more.end());
    const Finished finished = bench.run("refused", keys);
    CHECK(finished.code == Exit::config);
    return finished.out + finished.err;
  };
  CHECK_THAT(refusal({}), ContainsSubstring("reference.model_name is null"));
  const std::string teacher = "reference.model_name=nowhere";
  CHECK_THAT(refusal({teacher, "distill.num_prompts_per_step=5"}),
             ContainsSubstring("must be one or several global batches"));
  CHECK_THAT(refusal({teacher, "policy.train_global_batch_size=6", "checkpointing.save_period=3"}),
             ContainsSubstring("a checkpoint has no rollouts"));
  CHECK_THAT(refusal({teacher, "distributed.shard_strategy=optim_grads_params"}),
             ContainsSubstring("does not fit the generation of rollouts"));
  CHECK_THAT(refusal({"teacher.model_name=nowhere"}), ContainsSubstring("write reference.model_name"));
  CHECK_THAT(refusal({teacher, "distill.topk=300"}), ContainsSubstring("the vocabulary has 272"));
}
