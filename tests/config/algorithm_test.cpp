// Keys and sections that depend on the algorithm, and sections like policy.
#include "core/config/loader.h"
#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::config_detail;
using namespace nrl::test;

namespace {

/// The diagnostics as "file:line:column message (note)".
std::vector<std::string> texts(const ConfigResult& result) {
  std::vector<std::string> out;
  for (const Diagnostic& d : result.diagnostics)
    out.push_back(fmt::format("{}:{}:{} {}{}", d.file, d.line, d.column, d.message,
                              d.notes.empty() ? "" : " (" + d.notes[0] + ")"));
  return out;
}

/// A program with two algorithms and a second model.
const Schema& two_algorithms() {
  static const Schema schema([](Table& t) {
    NRL_KEY(t, algorithm).built({"pretrain", "dpo"}).help("What to train for.");
    t.section("pretrain", "A loop.", {Algorithm::pretrain});
    NRL_KEY(t, pretrain.seed).alias("training.seed").help("Seed.");
    t.section("dpo", "Another loop.", {Algorithm::dpo});
    NRL_KEY(t, data.num_workers).help("For all.");
    t.key(
         "dpo.more.val_batches", [](auto& c) -> auto& { return c.pretrain.val_batches; })
        .help("In a section of the section.");
    add_policy_keys(t, "policy", &Config::policy);
  });
  return schema;
}

}  // namespace

TEST_CASE("keys of another algorithm are refused where they are given", "[config][algorithm]") {
  const std::string note = " (the algorithm is pretrain (default); remove it)";
  CHECK(texts(load_text(base_yaml + "dpo: {loss_type: ipo, val_period: 3}\n")) ==
        std::vector<std::string>{"t.yaml:7:1 the section 'dpo' belongs to algorithm dpo" + note});
  CHECK(texts(load_base({"dpo.loss_type=ipo"})) ==
        std::vector<std::string>{
            "command line: dpo.loss_type=ipo:0:0 dpo.loss_type belongs to algorithm dpo" + note});
  // Also with its default, and by another spelling.
  CHECK(texts(load_text(base_yaml + "training:\n  beta: 0.05\n")) ==
        std::vector<std::string>{"t.yaml:8:3 dpo.beta belongs to algorithm dpo" + note});
  CHECK(texts(load_text("algorithm: pretrain\n" + base_yaml + "dpo: {loss_type: ipo}\n")) ==
        std::vector<std::string>{"t.yaml:8:1 the section 'dpo' belongs to algorithm dpo (the algorithm is "
                                 "pretrain (t.yaml:1:12); remove it)"});
}

TEST_CASE("the keys of distillation are also read as NeMo RL spells them", "[config][algorithm]") {
  const std::string base =
      "algorithm: distill\npolicy: {model: {model_type: llama}}\ndata: {train: {data_path: lessons.jsonl}}\n"
      "distill: {max_num_steps: 3}\n";
  const ConfigResult result =
      load_text(base +
                "loss_fn: {kl_type: mixed, mixed_kl_weight: 0.25, zero_outside_topk: true}\n"
                "distillation: {topk_logits_k: 7}\n");
  CHECK(texts(result).empty());
  const DistillationConfig& d = result.config.distillation;
  CHECK(d.kl_type == KlDirection::mixed);
  CHECK(d.mixed_kl_weight == 0.25);
  CHECK(d.zero_outside_topk);
  CHECK(d.topk == 7);
  CHECK(
      texts(load_text(base + "loss_fn: {type: clip}\n")) ==
      std::vector<std::string>{"t.yaml:5:1 the section 'loss_fn' belongs to algorithm grpo (the algorithm is "
                               "distill (t.yaml:1:12); remove it)"});
}

TEST_CASE("each algorithm has its keys and those of all", "[config][algorithm]") {
  const auto load = [](const char* text) { return load_text(two_algorithms(), text, "t.yaml"); };
  CHECK(load("algorithm: pretrain\npretrain: {seed: 3}\ndata: {num_workers: 2}").ok());
  const ConfigResult dpo = load("dpo:\n  more: {val_batches: 4}\ndata: {num_workers: 2}\nalgorithm: dpo");
  CHECK(dpo.ok());
  CHECK(dpo.config.pretrain.val_batches == 4);
  CHECK(texts(load("pretrain: {seed: 3}\nalgorithm: dpo")) ==
        std::vector<std::string>{
            "t.yaml:1:1 the section 'pretrain' belongs to algorithm pretrain (the algorithm "
            "is dpo (t.yaml:2:12); remove it)"});
  const ConfigResult alias = load("training: {seed: 3}\nalgorithm: dpo");
  CHECK(texts(alias) ==
        std::vector<std::string>{"t.yaml:1:12 pretrain.seed belongs to algorithm pretrain (the "
                                 "algorithm is dpo (t.yaml:2:12); remove it)"});
  CHECK(alias.config.pretrain.seed == Config{}.pretrain.seed);
  CHECK(!alias.sound("pretrain.seed"));
  CHECK(texts(load("algorithm: pretrain\ndpo: {more: {val_batches: 4}}")).size() == 1);
}

TEST_CASE("explain says which algorithm has a key", "[config][algorithm]") {
  CHECK(contains(explain("dpo.loss_type"), "only in  algorithm dpo\n"));
  CHECK(contains(explain("pretrain.seed"), "only in  algorithm pretrain\n"));
  CHECK(!contains(explain("data.seed"), "only in"));
}

TEST_CASE("the loop is that of the algorithm", "[config][algorithm]") {
  Config config;
  config.pretrain.seed = 7;
  CHECK(&resolved_loop(config) == &config.pretrain);
  CHECK(loop_key(config, "seed") == "pretrain.seed");
  CHECK(data_seed(config) == 7);
  config.data.seed = 8;
  CHECK(data_seed(config) == 8);
  config.algorithm = Algorithm::sft;
  CHECK(&resolved_loop(config) == &config.sft);
  CHECK(loop_key(config, "seed") == "sft.seed");
  config.algorithm = Algorithm::dpo;
  CHECK(&resolved_loop(config) == &config.dpo);
  config.algorithm = Algorithm::rm;
  CHECK(&resolved_loop(config) == &config.rm);
  config.algorithm = Algorithm::grpo;
  CHECK(&resolved_loop(config) == &config.grpo);
  CHECK(loop_key(config, "val_period") == "grpo.val_period");
  config.algorithm = Algorithm::distill;
  CHECK(&resolved_loop(config) == &config.distill);
}

TEST_CASE("another section can have the keys of a policy", "[config][policy]") {
  // All are bound to the one policy that there is.
  const Schema schema([](Table& t) {
    add_top_keys(t);
    add_policy_keys(t, "policy", &Config::policy);
    add_policy_keys(t, "teacher", &Config::policy);
  });
  const auto load = [&](const char* text) { return load_text(schema, text, "t.yaml"); };
  const ConfigResult teacher = load(
      "teacher:\n"
      "  model: {rope_scaling: {factor: 2}, vocab_size: 9}\n"
      "  megatron_cfg: {optimizer: {lr: 0.5}}\n"
      "  attention_heads: 3\n"
      "  max_grad_norm: null\n");
  CHECK(texts(teacher).empty());
  CHECK(teacher.config.policy.optimizer.lr == 0.5);
  CHECK(!teacher.config.policy.max_grad_norm);
  CHECK(teacher.config.policy.model_json ==
        R"({"rope_scaling": {"factor": 2}, "vocab_size": 9, "num_attention_heads": 3})");
  const Schema other([](Table& t) {
    add_top_keys(t);
    add_policy_keys(t, "other", &Config::policy);
  });
  CHECK(load_text(other, "other: {model: {vocab_size: 9}}", "t.yaml").config.policy.model_json ==
        R"({"vocab_size": 9})");
  // Spellings from outside of the section mean the policy.
  CHECK(schema.find_alias("training.learning_rate").key == schema.find("policy.optimizer.lr"));
  CHECK(schema.find_alias("policy.megatron_cfg.optimizer.lr").key == schema.find("policy.optimizer.lr"));
  CHECK(schema.find_alias("teacher.megatron_cfg.optimizer.lr").key == schema.find("teacher.optimizer.lr"));
  CHECK(texts(load("teacher: {optimizer: {lrr: 1}}")) ==
        std::vector<std::string>{
            "t.yaml:1:23 unknown key 'lrr' (keys here: name, lr, weight_decay, betas, eps, "
            "use_precision_aware_optimizer, exp_avg_dtype, exp_avg_sq_dtype, store_param_remainders, "
            "main_params_dtype, "
            "main_grads_dtype, lr_scaling)"});
}
