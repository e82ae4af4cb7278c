// Keys of adapters and frozen parameters.
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

const Need adapters{is("policy.lora.enabled", {"true"})};

}  // namespace

// NRL_POLICY_KEY(table, a.b): the key "a.b" of the section, bound to PolicyConfig::a.b.
#define NRL_POLICY_KEY(table, member) \
  table.key(                          \
      #member, [](auto& c) -> auto& { return c.member; })

void add_adapter_keys(PolicyTable& t) {
  t.section(
      "lora",
      "Low-rank adapters (LoRA): y = x W^T + s dropout(x) A^T B^T with a frozen W, of which checkpoints hold "
      "only A and B, as PEFT stores them (docs/post-training.md).");
  NRL_POLICY_KEY(t, lora.enabled)
      .alias("policy.dtensor_cfg.lora_cfg.enabled")
      .alias("training.use_peft")
      .help(
          "Train adapters instead of the weights, which policy.model_name gives. Not with policy.freeze, nor "
          "policy.fp8_cfg.fp8_param.");
  NRL_POLICY_KEY(t, lora.dim)
      .at_least(1)
      .at_most(4096)
      .alias("policy.dtensor_cfg.lora_cfg.dim")
      .alias("policy.lora.r")
      .alias("training.lora_r")
      .help("Rank: A is (dim, in), B (out, dim).")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.alpha)
      .above(0)
      .at_most(1e6)
      .alias("policy.dtensor_cfg.lora_cfg.alpha")
      .alias("policy.lora.lora_alpha")
      .alias("training.lora_alpha")
      .help("s is alpha / dim, with use_rslora alpha / sqrt(dim).")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.dropout)
      .at_least(0)
      .at_most(0.999)
      .alias("policy.dtensor_cfg.lora_cfg.dropout")
      .alias("policy.lora.lora_dropout")
      .alias("training.lora_dropout")
      .help(
          "Dropout of the adapter's input in training. Modules that are one matrix here (q, k and v; gate "
          "and up) "
          "share a mask.")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.use_rslora)
      .help("Scale of rank-stabilized LoRA (Kalajdzievski, 2023).")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.target_modules)
      .alias("policy.dtensor_cfg.lora_cfg.target_modules")
      .alias("training.lora_target_modules")
      .help(
          "Modules that get an adapter, by their names in the model's files or the last parts of them, in "
          "which * "
          "stands for any text: [q_proj, v_proj], \"layers.0.*\". all-linear: all matrices of attention and "
          "of "
          "dense MLPs. Embeddings, output projection, routers and experts have none.")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.exclude_modules)
      .alias("policy.dtensor_cfg.lora_cfg.exclude_modules")
      .help("Modules among them that get none, written in the same way.")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.lora_A_init)
      .resume(OnResume::unrelated)
      .alias("policy.dtensor_cfg.lora_cfg.lora_A_init")
      .help(
          "Initial numbers of A: kaiming: uniform in +-1/sqrt(in), as in PEFT; xavier: normal with variance "
          "2/(in + dim), as in NeMo. B begins with zeros.")
      .only_with(adapters);
  NRL_POLICY_KEY(t, lora.adapter)
      .resume(OnResume::unrelated)
      .help(
          "Start from this adapter, a directory with adapter_model.safetensors and adapter_config.json of "
          "PEFT. "
          "dim, alpha, use_rslora and the modules must be the same.")
      .only_with(adapters);
  NRL_POLICY_KEY(t, freeze)
      .help(
          "Tensors that are not trained, by their names in the model's files, or those of their modules, or "
          "the last "
          "parts of them, in which * stands for any text: [embed_tokens, \"layers.0.*\"]. They cost no "
          "gradient and "
          "no optimizer state.")
      .only_with({is("policy.lora.enabled", {"false"})})
      .idle("[]");
}

}  // namespace nrl::config_detail
