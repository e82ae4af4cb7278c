// Runs on rollouts that the policy generates, in this process.
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "apps/plan/generation.h"
#include "apps/state/model_source.h"
#include "apps/train/start/memory_fit.h"
#include "core/base/text.h"
#include "tests/catch.h"
#include "tests/train/digits.h"

using namespace nrl;
using namespace nrl::test;

TEST_CASE("a policy is trained on what it generates", "[grpo]") {
  const Digits bench;
  const Finished finished = bench.learn(
      "run", {"data.validation={data_path: " + (bench / "validation.jsonl") + ", format: prompts}",
              "loop.val_period=2", "grpo.max_val_samples=5", "grpo.val_num_generations_per_prompt=2",
              "policy.generation.val_temperature=1"});
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  CHECK_THAT(finished.out, ContainsSubstring("4 prompts x 3 completions at once: 1 steps of 12 sequences"));
  const Rows steps = bench.steps("run");
  REQUIRE(steps.size() == 4);
  for (const JsonValue& row : steps) {
    CHECK(row.get_double("completion_tokens") >= 1);
    CHECK(row.get_double("completion_tokens") <= 3);
    CHECK(row.get_double("reward") >= 0);
    CHECK(row.get_double("reward_letter") <= 1);
    CHECK(row.get_double("token_mult_prob_error") < 1 + 2e-5);
    CHECK(row.get_double("unscored_rate") == 0);
    // On the policy the ratio is 1.
    CHECK(row.get_double("probs_ratio") == Approx(1).epsilon(1e-5));
  }
  Rows evaluations;
  for (const JsonValue& row : bench.rows("run"))
    if (row.contains("val_reward")) evaluations.push_back(row);
  REQUIRE(evaluations.size() == 2);
  CHECK(evaluations[0].get_double("val_pass_at_2") >= evaluations[0].get_double("val_pass_at_1"));
  const Rows samples = bench.samples("run");
  CHECK(samples.size() == 4 * 3 + 2 * 5 * 2);
  CHECK_THAT(samples[0].get_string("record"), ContainsSubstring("prompts.jsonl:"));
}

TEST_CASE("rollouts continue where a checkpoint was saved, bit for bit", "[grpo]") {
  const Digits bench;
  const std::vector<std::string> saves{"checkpointing.save_period=2"};
  REQUIRE(bench.learn("whole", saves).code == Exit::ok);
  REQUIRE(bench.learn("parts", {"checkpointing.save_period=2", "loop.max_num_steps=2"}).code == Exit::ok);
  CHECK(bench.position("parts", 2).get_int("prompts") == 8);
  REQUIRE(bench.learn("parts", saves).code == Exit::ok);
  CHECK(bench.weights("whole", 4) == bench.weights("parts", 4));
  CHECK(bench.values("whole", "reward") == bench.values("parts", "reward"));
  CHECK(bench.read("whole/logs/samples.jsonl") != "");
  // Texts of steps behind the checkpoint are not kept twice.
  REQUIRE(bench.learn("longer", {"checkpointing.save_period=2", "loop.max_num_steps=3"}).code == Exit::ok);
  std::filesystem::remove_all(bench / "longer/checkpoints/step-3");
  REQUIRE(bench.learn("longer", saves).code == Exit::ok);
  CHECK(bench.samples("whole").size() == bench.samples("longer").size());
}

TEST_CASE("training computes the log-probabilities of another temperature as the sampler does", "[grpo]") {
  const Digits bench;
  for (const char* const layout : {"", "distributed.tensor_parallel_size=2"}) {
    CAPTURE(layout);
    std::vector<std::string> keys{"policy.generation.temperature=0.7", "policy.optimizer.lr=0.05"};
    if (*layout) keys.emplace_back(layout);
    const std::string name = *layout ? "two" : "one";
    const Finished finished =
        *layout ? bench.run_ranks(NRL_TWO_RANKS, name, bench.overrides(keys)) : bench.learn(name, keys);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    REQUIRE(bench.steps(name).size() == 4);
    for (const JsonValue& row : bench.steps(name)) {
      CHECK(row.get_double("token_mult_prob_error") < 1 + 2e-5);
      CHECK(row.get_double("probs_ratio") == Approx(1).epsilon(2e-5));
    }
  }
  CHECK(bench.values("one", "reward") == bench.values("two", "reward"));
  // Other texts, and another gradient of the same ones.
  REQUIRE(bench.learn("plain", {"policy.optimizer.lr=0.05"}).code == Exit::ok);
  CHECK(bench.values("plain", "grad_norm") != bench.values("one", "grad_norm"));
}

TEST_CASE("a policy of all weights is compared with a frozen copy", "[grpo]") {
  const Digits bench;
  const std::vector<std::string> keys{"loss_fn.reference_policy_kl_penalty=0.1", "policy.optimizer.lr=0.05",
                                      "checkpointing.save_period=2"};
  const Finished finished = bench.learn("whole", keys);
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  const std::vector<double> divergence = bench.values("whole", "kl_penalty");
  REQUIRE(divergence.size() == 4);
  CHECK(divergence.front() == Approx(0).margin(1e-9));
  CHECK(divergence.back() > 1e-4);
  // A checkpoint has no reference: it is loaded again before the checkpoint.
  std::vector<std::string> first = keys;
  first.emplace_back("loop.max_num_steps=2");
  REQUIRE(bench.learn("parts", first).code == Exit::ok);
  REQUIRE(bench.learn("parts", keys).code == Exit::ok);
  CHECK(bench.weights("whole", 4) == bench.weights("parts", 4));
  CHECK(bench.values("parts", "kl_penalty") == divergence);
  // The penalty changes the gradients.
  REQUIRE(bench.learn("plain", {"policy.optimizer.lr=0.05"}).code == Exit::ok);
  CHECK(bench.values("plain", "grad_norm") != bench.values("whole", "grad_norm"));
  for (const std::string layout :
       {"distributed.shard_strategy=optim", "distributed.tensor_parallel_size=2"}) {
    CAPTURE(layout);
    std::vector<std::string> more = keys;
    more.push_back(layout);
    const std::string name = layout.substr(layout.find('.') + 1, 5);
    const Finished two = bench.run_ranks(NRL_TWO_RANKS, name, bench.overrides(more));
    INFO(two.err);
    REQUIRE(two.code == Exit::ok);
    const std::vector<double> other = bench.values(name, "kl_penalty");
    for (size_t i = 0; i < other.size(); ++i)
      CHECK(other[i] == Approx(divergence[i]).epsilon(1e-3).margin(1e-6));
  }
}

TEST_CASE("several steps on the same rollouts leave the policy that made them", "[grpo]") {
  const Digits bench;
  const Finished finished =
      bench.learn("run", {"policy.train_global_batch_size=6", "policy.optimizer.lr=0.05"});
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  const Rows steps = bench.steps("run");
  REQUIRE(steps.size() == 4);
  for (size_t i = 0; i < steps.size(); ++i) CHECK(steps[i].contains("reward") == (i % 2 == 0));
  CHECK(steps[0].get_double("probs_ratio") == Approx(1).epsilon(1e-5));
  CHECK(std::abs(steps[1].get_double("probs_ratio") - 1) > 1e-4);
}

TEST_CASE("keys of advantages and of which rollouts are trained change the steps", "[grpo]") {
  const Digits bench;
  REQUIRE(bench.learn("plain").code == Exit::ok);
  for (const std::string change :
       {"grpo.use_leave_one_out_baseline=false", "grpo.advantage_std=none", "grpo.overlong_filtering=true"}) {
    CAPTURE(change);
    REQUIRE(bench.learn("changed", {change, "checkpointing.enabled=false"}).code == Exit::ok);
    CHECK(bench.values("plain", "reward").front() == bench.values("changed", "reward").front());
    CHECK(bench.values("plain", "grad_norm") != bench.values("changed", "grad_norm"));
  }
  // Random text never has the answer: all groups are equal.
  const Finished equal = bench.learn("equal", {"reward=[exact]", "loop.max_num_steps=10"});
  CHECK_THAT(equal.err,
             ContainsSubstring("all rewards of a prompt's completions were equal, 10 generations"));
  // Three times as many prompts are asked then.
  REQUIRE(bench
              .learn("dynamic", {"reward=[exact]", "grpo.use_dynamic_sampling=true",
                                 "grpo.dynamic_sampling_max_gen_batches=3", "loop.max_num_steps=2"})
              .code == Exit::ok);
  CHECK(bench.position("dynamic", 2).get_int("prompts") == 2 * 3 * 4);
  CHECK(bench.values("dynamic", "dropped_groups") == std::vector<double>{12, 12});
}

TEST_CASE("a layout changes neither the rollouts nor the losses", "[grpo]") {
  const Digits bench;
  REQUIRE(bench.learn("one").code == Exit::ok);
  for (const std::string layout :
       {"distributed.shard_strategy=optim_grads", "distributed.tensor_parallel_size=2"}) {
    const std::string name = layout.substr(layout.find('.') + 1, 5);
    const Finished finished = bench.run_ranks(NRL_TWO_RANKS, name, bench.overrides({layout}));
    CAPTURE(layout);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    CHECK(bench.values("one", "reward") == bench.values(name, "reward"));
    const std::vector<double> one = bench.values("one", "loss"), two = bench.values(name, "loss");
    for (size_t i = 0; i < one.size(); ++i) CHECK(two[i] == Approx(one[i]).epsilon(1e-5).margin(1e-6));
  }
}

TEST_CASE("divergence in rewards, REINFORCE++ and weights of importance survive restarts and layouts",
          "[grpo]") {
  const Digits bench;
  const std::vector<std::vector<std::string>> family{
      {"loss_fn.reference_policy_kl_penalty=0.05", "loss_fn.use_kl_in_reward=true"},
      {"grpo.adv_estimator={name: reinforce_plus_plus}", "loss_fn.type=reinforce",
       "loss_fn.reference_policy_kl_penalty=0.05", "loss_fn.use_kl_in_reward=true",
       "loss_fn.reference_policy_kl_type=k1"},
      {"loss_fn.type=gspo", "loss_fn.use_importance_sampling_correction=true",
       "loss_fn.truncated_importance_sampling_type=seq-icepop",
       "loss_fn.truncated_importance_sampling_ratio=2"}};
  for (size_t i = 0; i < family.size(); ++i) {
    CAPTURE(i);
    std::vector<std::string> keys = family[i];
    keys.insert(keys.end(), {"policy.optimizer.lr=0.05", "checkpointing.save_period=2"});
    const std::string whole = fmt::format("whole{}", i), parts = fmt::format("parts{}", i);
    const Finished finished = bench.learn(whole, keys);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    for (const JsonValue& row : bench.steps(whole))
      CHECK(row.get_double("sampling_importance_ratio") == Approx(1).epsilon(2e-5));
    std::vector<std::string> first = keys;
    first.emplace_back("loop.max_num_steps=2");
    REQUIRE(bench.learn(parts, first).code == Exit::ok);
    REQUIRE(bench.learn(parts, keys).code == Exit::ok);
    CHECK(bench.weights(whole, 4) == bench.weights(parts, 4));
    for (const std::string layout :
         {"distributed.shard_strategy=optim_grads", "distributed.tensor_parallel_size=2"}) {
      CAPTURE(layout);
      std::vector<std::string> more = keys;
      more.push_back(layout);
      const std::string two = fmt::format("{}{}", layout.substr(layout.find('.') + 1, 5), i);
      const Finished other = bench.run_ranks(NRL_TWO_RANKS, two, bench.overrides(more));
      INFO(other.err);
      REQUIRE(other.code == Exit::ok);
      const std::vector<double> want = bench.values(whole, "loss"), got = bench.values(two, "loss");
      for (size_t s = 0; s < want.size(); ++s) CHECK(got[s] == Approx(want[s]).epsilon(1e-3).margin(2e-5));
    }
  }
}

TEST_CASE("a student learns from a teacher that scores what it generates", "[grpo][distill]") {
  const Digits bench;
  // A teacher of another size, which writes letters.
  REQUIRE(bench
              .learn("teacher", {"policy.model.hidden_size=32", "policy.model.intermediate_size=48",
                                 "policy.optimizer.lr=0.02", "loop.max_num_steps=40",
                                 "checkpointing.save_period=40", "loop.seed=3"})
              .code == Exit::ok);
  const std::vector<std::string> keys{"reward=[]",
                                      "reference.model_name=" + bench / "teacher/checkpoints/step-40",
                                      "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}",
                                      "grpo.num_prompts_per_step=8",
                                      "grpo.num_generations_per_prompt=12",
                                      "policy.train_global_batch_size=96",
                                      "policy.train_micro_batch_size=12",
                                      "loss_fn={reference_policy_kl_penalty: 1, use_kl_in_reward: true, "
                                      "reference_policy_kl_type: k1}",
                                      "policy.optimizer.lr=0.02",
                                      "loop.max_num_steps=40",
                                      "checkpointing.save_period=20"};
  const Finished finished = bench.learn("whole", keys);
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  // The plan knows what the run needs beside training.
  const ConfigResult config = load_config(bench / "whole/logs/config.yaml", {});
  REQUIRE(config.ok());
  const auto plan =
      plan::make_run_plan(config.config, train::load_model_spec(config), resolve_batch(config.config, 1),
                          plan::grid_position(config.config, 1, 0), DeviceType::cpu, 1);
  const int64_t reference = train::reference_bytes(config.config, *plan);
  CHECK_THAT(finished.out + finished.err,
             ContainsSubstring("beside the policy: " + human_bytes(static_cast<uint64_t>(reference))));
  const plan::GenerationPlan least = plan::plan_generation(config.config, *plan, 0);
  CHECK(least.memory.total() > 0);
  CHECK(plan::total(train::needed_memory(config.config, *plan)) ==
        plan::total(plan::planned_memory(config.config, *plan)) +
            static_cast<double>(reference + least.memory.total()));
  const std::vector<double> divergence = bench.values("whole", "kl_penalty");
  REQUIRE(divergence.size() == 40);
  double first = 0, last = 0;
  for (size_t i = 0; i < 5; ++i) first += divergence[i], last += divergence[35 + i];
  CHECK(first > 0.5);
  CHECK(last < 0.7 * first);
  CHECK(!bench.steps("whole").front().contains("reward"));
  std::vector<std::string> more = keys;
  more.emplace_back("loop.max_num_steps=20");
  REQUIRE(bench.learn("parts", more).code == Exit::ok);
  REQUIRE(bench.learn("parts", keys).code == Exit::ok);
  CHECK(bench.weights("whole", 40) == bench.weights("parts", 40));
  more.back() = "loop.max_num_steps=4";
  more.emplace_back("checkpointing.enabled=false");
  std::vector<std::string> raw = more;
  raw.emplace_back("grpo.adv_estimator={name: raw, minus_baseline: true}");
  REQUIRE(bench.learn("raw", raw).code == Exit::ok);
  CHECK(bench.values("raw", "kl_penalty").front() == divergence.front());
  CHECK(bench.values("raw", "grad_norm").front() != bench.values("whole", "grad_norm").front());
  for (const std::string layout :
       {"distributed.shard_strategy=optim", "distributed.tensor_parallel_size=2"}) {
    CAPTURE(layout);
    std::vector<std::string> divided = more;
    divided.push_back(layout);
    const std::string name = layout.substr(layout.find('.') + 1, 5);
    const Finished two = bench.run_ranks(NRL_TWO_RANKS, name, bench.overrides(divided));
    INFO(two.err);
    REQUIRE(two.code == Exit::ok);
    const std::vector<double> got = bench.values(name, "kl_penalty");
    REQUIRE(got.size() == 4);
    for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(divergence[i]).epsilon(1e-3).margin(1e-5));
  }
  // Other vocabularies cannot be compared.
  REQUIRE(bench
              .learn("wide",
                     {"policy.model.vocab_size=288", "loop.max_num_steps=1", "checkpointing.save_period=1"})
              .code == Exit::ok);
  std::vector<std::string> wide = keys;
  wide[1] = "reference.model_name=" + bench / "wide/checkpoints/step-1";
  const Finished refused = bench.learn("refused", wide);
  CHECK(refused.code == Exit::config);
  CHECK_THAT(refused.err, ContainsSubstring("has a vocabulary of 288 tokens, the policy one of 272"));
}

TEST_CASE("a command judges as a verifier does, and what it cannot judge is not trained", "[grpo]") {
  const Digits bench;
  const auto with = [&](const std::string& reward) {
    return std::vector<std::string>{"reward=[" + reward + "]"};
  };
  std::ofstream(bench / "judge.sh") << R"(while IFS= read -r line; do
    id=${line#*\"id\":}; id=${id%%,*}
    case $line in *'"ended":true'*) r=1 ;; *) r=$1 ;; esac
    printf '{"id": %s, "reward": %s}\n' "$id" "$r"
  done)";
  const auto judge = [&](const std::string& cut) {
    return with("{type: command, command: \"sh " + (bench / "judge.sh") + " " + cut + "\"}");
  };
  REQUIRE(bench.learn("zero", judge("0")).code == Exit::ok);
  const Finished finished = bench.learn("null", judge("null"));
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  // Completions that ended have the reward 1; the others have 0, or none.
  for (const JsonValue& row : bench.steps("zero"))
    CHECK(row.get_double("reward") == Approx(1 - row.get_double("truncation_rate")));
  for (const JsonValue& row : bench.steps("null")) {
    CHECK(row.get_double("unscored_rate") == row.get_double("truncation_rate"));
    CHECK(row.get_double("loss") == Approx(0).margin(1e-6));  // equal rewards
  }
}

TEST_CASE("a run whose rewards stop coming ends with the reason, on every rank", "[grpo]") {
  const Digits bench;
  // The command judges the first two of six generations, and none after them.
  std::ofstream(bench / "judge.sh") << R"sh(while IFS= read -r line; do
    printf x >>"$1"
    [ "$(wc -c <"$1")" -le 24 ] || exit 1
    id=${line#*\"id\":}; id=${id%%,*}
    printf '{"id": %s, "reward": %s}\n' "$id" $((id % 2))
  done)sh";
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const std::string name = fmt::format("run{}", ranks);
    const std::vector<std::string> keys =
        bench.overrides({"reward=[{type: command, workers: 1, name: judge, command: \"sh " +
                             (bench / "judge.sh") + " " + (bench / name) + ".judged\"}]",
                         "loop.max_num_steps=30"});
    const Finished finished = ranks == 1 ? bench.run(name, keys) : bench.run_ranks(NRL_TWO_RANKS, name, keys);
    INFO(finished.err);
    CHECK(finished.code == Exit::unavailable);
    CHECK(bench.steps(name).size() >= 6);
    CHECK(bench.steps(name).size() <= 7);
    const std::string reason = "no completion of 5 generations in a row has a reward";
    const size_t first = finished.err.find(reason);
    CHECK(first != std::string::npos);
    CHECK(finished.err.find(reason, first + 1) == std::string::npos);
    CHECK_THAT(finished.err, ContainsSubstring("of reward judge, the command sh "));
    // The message refers to the samples, which the last generation has, too.
    CHECK(bench.samples(name).back().get_int("step") == bench.steps(name).back().get_int("step") + 1);
  }
}

TEST_CASE("rollouts that cannot be made are refused with the reason", "[grpo]") {
  const Digits bench;
  std::ofstream(bench / "bare.jsonl") << R"({"prompt": "1="})"
                                      << "\n";
  std::ofstream(bench / "long.jsonl") << R"({"prompt": "123456789=", "answer": "1"})"
                                      << "\n";
  struct Case {
    std::string change, message;
    Exit code;
  };
  const std::vector<Case> cases{
      {"reward=[]", "completions of prompts need a reward", Exit::config},
      {"reward=[{type: exakt}]", "there is no type 'exakt'", Exit::config},
      {"grpo.num_prompts_per_step=5", "must be one or several global batches", Exit::config},
      {"grpo.num_generations_per_prompt=1", "compare the completions of a prompt", Exit::config},
      {"loss_fn={use_importance_sampling_correction: true, type: gspo}", "weights each token", Exit::config},
      {"loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_type: icepop}",
       "leaves out what is beyond bounds, and there are none", Exit::config},
      {"loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_ratio_min: 2, "
       "truncated_importance_sampling_ratio: 1}",
       "is above", Exit::config},
      {"loss_fn={reference_policy_kl_penalty: 0.1, reference_policy_kl_type: k1}",
       "has an expected gradient of 0 as a loss", Exit::config},
      {"distributed.shard_strategy=optim_grads_params", "does not fit the generation of rollouts",
       Exit::config},
      {"data.train.data_path=" + (bench / "bare.jsonl"),
       "bare.jsonl:1: the record has no text or number under", Exit::data},
      {"data.train.data_path=" + (bench / "long.jsonl"), "long.jsonl:1: a prompt of 10 tokens leaves no room",
       Exit::data}};
  for (const Case& c : cases) {
    const Finished finished = bench.learn("refused", {c.change});
    CAPTURE(c.change);
    CHECK(finished.code == c.code);
    CHECK_THAT(finished.out + finished.err, ContainsSubstring(c.message));
  }
  const Finished finished =
      bench.learn("refused", {"policy.train_global_batch_size=6", "checkpointing.save_period=3"});
  CHECK(finished.code == Exit::config);
  CHECK_THAT(finished.out + finished.err, ContainsSubstring("a checkpoint has no rollouts"));
}
