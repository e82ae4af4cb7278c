// Keys of the losses of pairs, reward models and policies; files of NeMo RL and names of TRL.
#include <algorithm>

#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// A complete configuration of an algorithm.
ConfigResult load(const std::string& algorithm, std::vector<std::string> overrides,
                  const std::string& more = "") {
  return load_text("algorithm: " + algorithm +
                       "\npolicy: {model: {model_type: llama}, tokenizer: {name: bytes}}\n"
                       "loop: {max_num_steps: 10}\n"
                       "data: {train: {data_path: corpus}}\n" +
                       more,
                   std::move(overrides));
}

std::string problems(const ConfigResult& result) {
  return render(result.diagnostics);
}

}  // namespace

TEST_CASE("NeMo RL's names of the loss of pairs are read", "[config][objectives]") {
  const ConfigResult result = load_text(
      "dpo:\n"
      "  max_num_epochs: 1\n"
      "  max_num_steps: -1\n"
      "  val_period: 25\n"
      "  val_batches: -1\n"
      "  reference_policy_kl_penalty: 0.05\n"
      "  preference_average_log_probs: True\n"
      "  sft_average_log_probs: ${.preference_average_log_probs}\n"
      "  preference_loss_weight: 2\n"
      "  sft_loss_weight: 0.5\n"
      "policy: {model: {model_type: llama}, tokenizer: {name: bytes}}\n"
      "data: {train: {data_path: a}, validation: {data_path: b}}\n");
  INFO(problems(result));
  REQUIRE(result.ok());
  const Config& c = result.config;
  CHECK(c.algorithm == Algorithm::dpo);
  CHECK(c.dpo.max_num_epochs == 1);
  CHECK(!c.dpo.max_num_steps);
  CHECK(!c.dpo.val_batches);
  CHECK(c.dpo.val_period == 25);
  CHECK(evaluates(c));
  CHECK(trains_on_examples(c));
  CHECK(c.preference.beta == 0.05);
  CHECK(c.preference.average_log_probs == AutoOr<bool>(true));
  CHECK(c.preference.sft_average_log_probs == AutoOr<bool>(true));
  CHECK(c.preference.preference_weight == 2);
  CHECK(c.preference.sft_weight == 0.5);
  const ConfigResult again = load_text(dump_resolved(result));
  INFO(problems(again));
  CHECK(again.ok());
  CHECK(again.config == c);
}

TEST_CASE("the loss of pairs takes means where it is defined on them", "[config][objectives]") {
  for (const auto& [type, always] : {std::pair("sigmoid", false),
                                     {"robust", false},
                                     {"hinge", false},
                                     {"apo_zero", false},
                                     {"apo_down", false},
                                     {"ipo", true},
                                     {"simpo", true},
                                     {"orpo", true}}) {
    CAPTURE(type);
    const std::vector<std::string> given{fmt::format("dpo.loss_type={}", type), "dpo.sft_weight=1"};
    const ConfigResult result = load("dpo", given);
    CHECK(result.ok());
    CHECK(averages_log_probs(result.config.preference) == always);
    CHECK(averages_sft_log_probs(result.config.preference) == always);
    CHECK(load_text(dump_resolved(result)).ok());
    const auto with = [&](const char* key) {
      std::vector<std::string> all = given;
      all.emplace_back(key);
      return load("dpo", all);
    };
    const ConfigResult mean = with("dpo.average_log_probs=true"), sum = with("dpo.average_log_probs=false");
    CHECK(mean.ok());
    CHECK(averages_log_probs(mean.config.preference));
    CHECK(averages_sft_log_probs(mean.config.preference));
    CHECK(sum.ok() == !always);
    if (always) CHECK(contains(problems(sum), "dpo.average_log_probs: false contradicts dpo.loss_type: "));
    CHECK(!averages_sft_log_probs(with("dpo.sft_average_log_probs=false").config.preference));
  }
}

TEST_CASE("options of a loss of pairs need that loss", "[config][objectives]") {
  const auto refusal = [](const char* type, const char* option) {
    return problems(load("dpo", {fmt::format("dpo.loss_type={}", type), option}));
  };
  const char *smoothing = "dpo.label_smoothing=0.1", *gamma = "dpo.simpo_gamma=1.5";
  for (const char* type : {"sigmoid", "robust", "simpo"}) CHECK(refusal(type, smoothing).empty());
  for (const char* type : {"hinge", "ipo", "apo_zero", "apo_down"})
    CHECK(contains(refusal(type, smoothing),
                   "has no effect without dpo.loss_type: sigmoid or robust or simpo"));
  CHECK(refusal("simpo", gamma).empty());
  CHECK(contains(refusal("ipo", gamma), "has no effect without dpo.loss_type: simpo"));
  CHECK(contains(refusal("robust", "dpo.label_smoothing=0.5"), "out of range"));
  CHECK(contains(refusal("robust", "dpo.beta=0.2"), "is sigmoid where dpo.label_smoothing is 0"));
  CHECK(load("dpo", {"dpo.loss_type=robust"}).ok());
  CHECK(contains(refusal("orpo", "dpo.beta=0.2"), "dpo.sft_weight: 1"));
  CHECK(!load("dpo", {"dpo.loss_type=orpo"}).ok());
  CHECK(contains(refusal("sigmoid", "dpo.sft_average_log_probs=true"),
                 "has no effect without dpo.sft_weight above 0"));
  CHECK(contains(refusal("sigmoid", "dpo.beta=0"), "out of range"));
}

TEST_CASE("names of losses in other programs are answered with ours", "[config][objectives]") {
  const auto answer = [](const char* value) {
    return problems(load("dpo", {fmt::format("training.loss_type={}", value)}));
  };
  CHECK(contains(answer("sigmoid_norm"), "write loss_type: sigmoid and average_log_probs: true"));
  CHECK(contains(answer("cdpo"), "write loss_type: sigmoid and label_smoothing"));
  CHECK(contains(answer("exo_pair"), "expected sigmoid | robust | hinge | ipo"));
  CHECK(contains(problems(load("grpo", {"training.loss_type=cispo"})), "write loss_fn.type: cispo"));
  CHECK(contains(problems(load("dpo", {"training.rpo_alpha=1"})), "write dpo.sft_weight: ALPHA"));
}

TEST_CASE("a name that several algorithms have means the configured one", "[config][objectives]") {
  const ConfigResult pairs = load("dpo", {"training.beta=0.3", "training.loss_type=ipo"});
  CHECK(pairs.ok());
  CHECK(pairs.config.preference.beta == 0.3);
  CHECK(pairs.config.preference.loss_type == PreferenceLoss::ipo);
  const ConfigResult policy =
      load("grpo", {"training.beta=0.3", "training.loss_type=dr_grpo", "training.epsilon=0.1",
                    "training.epsilon_high=0.28", "training.delta=3", "training.seed=5"});
  INFO(problems(policy));
  REQUIRE(policy.ok());
  const PolicyLossConfig& loss = policy.config.loss_fn;
  CHECK(loss.reference_policy_kl_penalty == 0.3);
  CHECK(loss_aggregation(loss) == LossAggregation::sequence_mean_token_sum_norm);
  CHECK(loss.ratio_clip_min == 0.1);
  CHECK(loss.ratio_clip_max == 0.28);
  CHECK(loss.ratio_clip_c == 3);
  CHECK(policy.config.grpo.seed == 5);
  CHECK(policy.config.preference.beta == Config{}.preference.beta);
  bool said = false;
  for (const Translation& t : policy.translated)
    said = said ||
           (t.given == "training.beta: 0.3" && t.canonical == "loss_fn.reference_policy_kl_penalty: 0.3");
  CHECK(said);
  // Beside the name of the configured algorithm.
  const std::string both = "training: {beta: 0.3}\nloss_fn: {reference_policy_kl_penalty: 0.2}\n";
  CHECK(contains(problems(load("grpo", {}, both)),
                 "loss_fn.reference_policy_kl_penalty is given twice with different values"));
  CHECK(load("grpo", {"loss_fn.reference_policy_kl_penalty=0.1"}, "training: {beta: 0.3}\n")
            .config.loss_fn.reference_policy_kl_penalty == 0.1);
  CHECK(load("grpo", {"training.beta=0.1"}, "loss_fn: {reference_policy_kl_penalty: 0.3}\n")
            .config.loss_fn.reference_policy_kl_penalty == 0.1);
}

TEST_CASE("NeMo RL's switches of the loss of a policy are read", "[config][objectives]") {
  const std::string off =
      "  reference_policy_kl_penalty: 0.01\n  reference_policy_kl_type: \"k3\"\n"
      "  kl_input_clamp_value: 20.0\n  kl_output_clamp_value: 10.0\n  ratio_clip_min: 0.2\n"
      "  ratio_clip_max: 0.2\n  ratio_clip_c: null\n  use_on_policy_kl_approximation: false\n"
      "  use_importance_sampling_correction: false\n  truncated_importance_sampling_type: null\n"
      "  truncated_importance_sampling_ratio: null\n  force_on_policy_ratio: false\n"
      "  use_kl_in_reward: false\n  positive_example_nll_weight: 0.0\n";
  const auto with = [&](const std::string& switches) {
    return load("grpo", {}, "loss_fn:\n" + off + switches);
  };
  const ConfigResult plain = with(
      "  sequence_level_importance_ratios: false\n  token_level_loss: true\n  use_cispo: false\n"
      "  disable_ppo_ratio: false\n");
  INFO(problems(plain));
  REQUIRE(plain.ok());
  CHECK(plain.config.loss_fn.type == PolicyObjective::clip);
  CHECK(loss_aggregation(plain.config.loss_fn) == LossAggregation::token_mean);
  CHECK(plain.config.loss_fn.reference_policy_kl_penalty == 0.01);
  const ConfigResult gspo = with("  sequence_level_importance_ratios: true\n  token_level_loss: false\n");
  INFO(problems(gspo));
  CHECK(gspo.ok());
  CHECK(gspo.config.loss_fn.type == PolicyObjective::gspo);
  CHECK(loss_aggregation(gspo.config.loss_fn) == LossAggregation::sequence_mean_token_sum);
  CHECK(contains(problems(with("  sequence_level_importance_ratios: true\n  token_level_loss: true\n")),
                 "loss_fn.aggregation: token_mean contradicts loss_fn.type: gspo"));
  CHECK(with("  use_cispo: true\n").config.loss_fn.type == PolicyObjective::cispo);
  CHECK(contains(problems(with("  use_cispo: true\n  disable_ppo_ratio: true\n")), "given twice"));
  CHECK(contains(problems(load("grpo", {"loss_fn.kl_input_clamp_value=5"})), "not supported yet"));
}

TEST_CASE("options of the loss of a policy need what they change", "[config][objectives]") {
  const auto text = [](std::vector<std::string> keys) { return problems(load("grpo", std::move(keys))); };
  CHECK(text({"loss_fn.type=cispo", "loss_fn.ratio_clip_max=5"}).empty());
  CHECK(contains(text({"loss_fn.type=reinforce", "loss_fn.ratio_clip_max=5"}), "has no effect without"));
  CHECK(contains(text({"loss_fn.type=cispo", "loss_fn.ratio_clip_c=3"}),
                 "has no effect without loss_fn.type: clip"));
  CHECK(contains(text({"loss_fn.ratio_clip_c=1"}), "out of range"));
  CHECK(text({"loss_fn.ratio_clip_c=3"}).empty());
  CHECK(text({"loss_fn.force_on_policy_ratio=true"}).empty());
  CHECK(contains(text({"loss_fn.force_on_policy_ratio=true", "loss_fn.ratio_clip_min=0.1"}),
                 "no effect without loss_fn.force_on_policy_ratio: false"));
  CHECK(text({"loss_fn.type=gspo", "loss_fn.force_on_policy_ratio=true"}).empty());
  CHECK(contains(text({"loss_fn.type=reinforce", "loss_fn.force_on_policy_ratio=true"}),
                 "has no effect without"));
  CHECK(contains(text({"loss_fn.type=rloo", "loss_fn.aggregation=token_mean"}), "contradicts"));
  CHECK(text({"loss_fn.type=rloo", "loss_fn.aggregation=sequence_mean_token_sum"}).empty());
  CHECK(contains(text({"loss_fn.reference_policy_kl_type=k2"}),
                 "has no effect without loss_fn.reference_policy_kl_penalty above 0"));
  const char* penalty = "loss_fn.reference_policy_kl_penalty=0.1";
  CHECK(text({penalty, "loss_fn.reference_policy_kl_type=k2"}).empty());
  CHECK(contains(text({penalty, "loss_fn.reference_policy_kl_type=k1"}), "expected gradient of 0"));
  CHECK(contains(problems(load("dpo", {"loss_fn.type=clip"})), "loss_fn.type belongs to algorithm grpo"));
}

TEST_CASE("advantages, weights of importance and temperatures have NeMo RL's and TRL's names",
          "[config][objectives]") {
  const std::vector<std::string> prompts{"data.train.format=prompts", "policy.train_global_batch_size=512",
                                         "reward=[{type: exact}]"};
  const auto with = [&](std::vector<std::string> keys) {
    keys.insert(keys.begin(), prompts.begin(), prompts.end());  // the last one of a key counts
    return load("grpo", std::move(keys));
  };
  const ConfigResult nemo =
      with({"grpo.adv_estimator={name: grpo, normalize_rewards: false, use_leave_one_out_baseline: false, "
            "minus_baseline: true}",
            "policy.generation={temperature: 0.7, top_p: 1.0, top_k: null}"});
  INFO(problems(nemo));
  REQUIRE(nemo.ok());
  CHECK(nemo.config.rollout.advantage_std == AdvantageStd::none);
  CHECK(!nemo.config.rollout.use_leave_one_out_baseline);
  CHECK(nemo.config.rollout.temperature == 0.7);
  CHECK(with({"training.temperature=0.5"}).config.rollout.temperature == 0.5);
  CHECK(contains(problems(with({"policy.generation.temperature=0"})), "out of range"));
  CHECK(
      contains(problems(with({"grpo.adv_estimator={name: reinforce_plus_plus}", "grpo.advantage_std=none"})),
               "has no effect without grpo.adv_estimator.name: grpo"));
  CHECK(contains(problems(with({"grpo.adv_estimator={minus_baseline: false}"})),
                 "has no effect without grpo.adv_estimator.name: reinforce_plus_plus"));
  CHECK(contains(problems(with({"loss_fn.use_kl_in_reward=true"})),
                 "has no effect without loss_fn.reference_policy_kl_penalty above 0"));
  const ConfigResult corrected =
      with({"loss_fn={use_importance_sampling_correction: true, "
            "truncated_importance_sampling_type: sequence_mask, "
            "truncated_importance_sampling_ratio: 2, type: gspo}"});
  INFO(problems(corrected));
  REQUIRE(corrected.ok());
  CHECK(corrected.config.loss_fn.truncated_importance_sampling_type == ImportanceSampling::seq_icepop);
  const std::string penalty = "loss_fn={reference_policy_kl_penalty: 0.1, use_kl_in_reward: true}";
  CHECK(with({penalty, "reward=[]"}).ok());
  CHECK(with({penalty, "grpo.adv_estimator={name: raw}", "grpo.num_generations_per_prompt=1",
              "policy.train_global_batch_size=32"})
            .ok());
  CHECK(contains(
      problems(with({penalty, "reference.model_name=m", "device=cuda", "policy.fp8_cfg.enabled=true"})),
      "does not fit policy.fp8_cfg.enabled"));
  CHECK(contains(problems(with({"reference.model_name=m"})),
                 "has no effect without algorithm: distill or loss_fn.reference_policy_kl_penalty above 0"));
}

TEST_CASE("distillation on policy has NeMo RL's names", "[config][objectives]") {
  const auto with = [&](std::vector<std::string> keys) {
    keys.insert(keys.begin(), {"data.train.format=prompts", "policy.train_global_batch_size=32",
                               "reference.model_name=teacher"});
    return load("distill", std::move(keys));
  };
  const ConfigResult nemo =
      with({"distillation={num_prompts_per_step: 16, num_generations_per_prompt: 2, "
            "topk_logits_k: 32}",
            "policy.generation={temperature: 0.7}"});
  INFO(problems(nemo));
  REQUIRE(nemo.ok());
  CHECK(generates_rollouts(nemo.config));
  CHECK(rollouts_at_once(nemo.config) == 32);
  CHECK(nemo.config.distillation.topk == 32);
  CHECK(nemo.config.rollout.temperature == 0.7);
  CHECK(contains(problems(with({"reward=[exact]"})), "has no effect without algorithm: grpo"));
  CHECK(contains(problems(with({"grpo.num_prompts_per_step=4"})), "grpo"));
  CHECK(
      contains(problems(load("distill", {"data.train.format=rollouts", "policy.generation.temperature=0.5"})),
               "has no effect without algorithm: grpo or data.train.format: prompts"));
}

TEST_CASE("every algorithm has its formats of data", "[config][objectives]") {
  struct Fit {
    const char *algorithm, *formats;
  };
  for (const auto& [algorithm, formats] :
       {Fit{"pretrain", "auto tokens"}, Fit{"sft", "auto text messages instruction"},
        Fit{"dpo", "auto preference"}, Fit{"rm", "auto preference"}, Fit{"grpo", "auto rollouts prompts"}})
    for (const std::string_view format : EnumNames<ExampleFormat>::names) {
      CAPTURE(algorithm, format);
      std::vector<std::string> keys{fmt::format("data.train.format={}", format)};
      if (format == "prompts" && std::string_view(algorithm) == "grpo")
        keys.insert(keys.end(), {"policy.train_global_batch_size=512", "reward=[{type: exact}]"});
      const ConfigResult result = load(algorithm, keys);
      INFO(problems(result));
      const bool fits = contains(fmt::format(" {} ", formats), fmt::format(" {} ", format));
      CHECK(result.ok() == fits);
      if (!fits) {
        CHECK(contains(problems(result), fmt::format("algorithm {} trains on ", algorithm)));
        CHECK(contains(problems(result), "or set algorithm: "));
      }
    }
}

TEST_CASE("rounded logits are reported where log-probabilities are compared", "[config][objectives]") {
  const std::vector<std::string> rounded{"policy.precision=bfloat16", "policy.logits_dtype=bfloat16",
                                         "device=cuda"};
  for (const auto& [algorithm, compares] : {std::pair("sft", false), {"dpo", true}, {"grpo", true}}) {
    const ConfigResult result = load(algorithm, rounded);
    INFO(problems(result));
    CHECK(result.ok());
    CHECK(contains(problems(result), "takes differences") == compares);
    CHECK(compares_log_probs(result.config) == compares);
  }
  CHECK(contains(problems(load("rm", rounded)), "policy.logits_dtype: bfloat16 has no effect"));
}

TEST_CASE("arguments of TRL's scripts are read below training", "[config][trl]") {
  const std::string arguments =
      "model_name_or_path: m\nlearning_rate: 5.0e-7\nnum_train_epochs: 2\neval_strategy: steps\n"
      "per_device_train_batch_size: 4\nmax_steps: -1\nmax_length: 512\nbeta: 0.2\nloss_type: hinge\n"
      "use_peft: true\nlora_r: 32\nlora_alpha: 16\nbf16: true\nwarmup_ratio: 0.1\n"
      "lr_scheduler_type: cosine\nlogging_steps: 25\nsave_steps: 100\noutput_dir: out\n"
      "precompute_ref_log_probs: true\n";
  std::string nested = "algorithm: dpo\ndata: {train: {data_path: p.jsonl}}\ntraining:\n  ";
  for (const char c : arguments) nested += c == '\n' ? "\n  " : std::string(1, c);
  const ConfigResult result = load_text(nested);
  INFO(problems(result));
  REQUIRE(result.ok());
  const PolicyConfig& p = result.config.policy;
  CHECK(p.model_name == "m");
  CHECK(p.optimizer.lr == 5e-7);
  CHECK(p.train_micro_batch_size == AutoOr<int64_t>(4));
  CHECK(p.max_total_sequence_length == 512);
  CHECK(p.lora.enabled);
  CHECK(p.lora.dim == 32);
  CHECK(p.lora.alpha == 16);
  CHECK(p.precision == Precision::bfloat16);
  CHECK(p.scheduler.warmup_ratio == 0.1);
  CHECK(result.config.dpo.max_num_epochs == 2);
  CHECK(!result.config.dpo.max_num_steps);
  CHECK(result.config.preference.beta == 0.2);
  CHECK(result.config.preference.loss_type == PreferenceLoss::hinge);
  CHECK(result.config.logger.log_interval == 25);
  CHECK(result.config.checkpointing.save_period == 100);
  CHECK(result.config.checkpointing.checkpoint_dir == "out");
  // At the top, where TRL's files have them, they are named with their place here.
  const std::string top = problems(load_text(base_yaml + "learning_rate: 1.0e-6\nrpo_alpha: 1\n"));
  CHECK(contains(top, "unknown key 'learning_rate'"));
  CHECK(contains(top, "policy.optimizer.lr"));
  CHECK(contains(top, "below a section 'training:'"));
  CHECK(contains(top, "write dpo.sft_weight: ALPHA"));
}

TEST_CASE("a backend of NeMo RL that is off is not read", "[config][nemo]") {
  const std::string file =
      "policy:\n"
      "  optimizer: {kwargs: {lr: 1.0e-6, foreach: False}}\n"
      "  dtensor_cfg: {_v2: true, enabled: true, tensor_parallel_size: 1, custom_parallel_plan: null,\n"
      "    env_vars: {}}\n"
      "  megatron_cfg: {enabled: false, tensor_model_parallel_size: 2, no_such_key: 1,\n"
      "    optimizer: {lr: 5.0e-6}}\n";
  const auto with = [&](std::vector<std::string> keys) {
    std::vector<std::string> all{"policy.model.model_type=llama", "pretrain.max_num_steps=1",
                                 "data.train.data_path=c"};
    all.insert(all.end(), keys.begin(), keys.end());
    return load_text(file, all);
  };
  const ConfigResult one = with({});
  INFO(problems(one));
  CHECK(one.ok());
  CHECK(one.config.policy.optimizer.lr == 1e-6);
  CHECK(one.config.distributed.tensor_parallel_size == 1);
  CHECK(std::any_of(one.translated.begin(), one.translated.end(),
                    [](const Translation& t) { return t.given == "policy.megatron_cfg.enabled: false"; }));
  // The last value of the switch decides.
  const std::string other =
      problems(with({"policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"}));
  CHECK(contains(other, "unknown key 'no_such_key'"));
  CHECK(contains(other, "policy.optimizer.lr is given twice"));
  CHECK(!contains(other, "tensor_parallel_size"));
  CHECK(contains(problems(with({"policy.megatron_cfg.enabled=7"})), "expected true or false"));
  // Later layers override what a section gives.
  CHECK(with({"distributed.tensor_parallel_size=4"}).config.distributed.tensor_parallel_size == 4);
  CHECK(with({"policy.dtensor_cfg.tensor_parallel_size=4"}).config.distributed.tensor_parallel_size == 4);
}

TEST_CASE("keys that ask for nothing are skipped", "[config][nemo]") {
  const auto text = [](std::vector<std::string> keys) { return problems(load_base(std::move(keys))); };
  CHECK(
      text({"policy.draft={enabled: false, loss_weight: 0.1}", "policy.generation=null", "env={}"}).empty());
  CHECK(contains(text({"policy.draft={enabled: true}"}), "drafts for generation"));
  CHECK(contains(text({"policy.optimizer.kwargs.fused=true"}), "a switch of PyTorch"));
  const std::string swanlab = "logger.swanlab.project=p";
  CHECK(contains(text({swanlab}), "not supported yet"));
  CHECK(contains(text({swanlab, "logger.swanlab_enabled=true"}), "logger.swanlab.project"));
  CHECK(text({swanlab, "logger.swanlab_enabled=false"}).empty());
  const std::string wandb = "logger.wandb.project=p";
  CHECK(contains(text({wandb}), "has no effect without logger.wandb_enabled: true"));
  CHECK(text({wandb, "logger.wandb_enabled=true"}).empty());
  CHECK(load_base({wandb, "logger.wandb_enabled=false"}).ok());
}

TEST_CASE("references can be relative to their section, and name keys of other programs", "[config][nemo]") {
  const auto directory = [](const std::string& reference) {
    return load_text(base_yaml + "logger: {log_dir: a}\ncheckpointing:\n  save_dir: " + reference + "\n");
  };
  CHECK(directory("${..logger.log_dir}").config.checkpointing.checkpoint_dir == "a");
  CHECK(directory("${logging.log_dir}").config.checkpointing.checkpoint_dir == "a");
  CHECK(contains(problems(directory("${.log_dir}")), "'checkpointing.log_dir' is not a key"));
  CHECK(contains(problems(directory("${...logger.log_dir}")), "must be the whole value"));
  CHECK(contains(problems(directory("${.save_dir}")), "circular"));
}
