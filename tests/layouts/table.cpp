#include "tests/layouts/table.h"

#include <spdlog/fmt/fmt.h>

namespace nrl::test {
namespace {

using Keys = std::vector<std::string>;

Value model(const std::string& name, const std::string& config, std::vector<std::string> tags = {},
            bool reorders = false) {
  return {
      name, {"policy.model={vocab_size: 61, max_position_embeddings: 128, " + config + "}"}, tags, reorders};
}

// Everything that ranks divide or copy: biases, grouped heads, tied embeddings, learned positions, QK norms,
// norms of outputs, windows, also in some layers only; experts with a dense layer, a shared expert, or so
// many that some ranks get no token.
Dimension families() {
  const std::string
      narrow = "hidden_size: 32, num_hidden_layers: 2, initializer_range: 0.2, num_attention_heads: 8, ",
      llama = "intermediate_size: 64, num_key_value_heads: 4, head_dim: 16, ",
      wide =
          "hidden_size: 128, num_hidden_layers: 2, initializer_range: 0.1, num_attention_heads: 4, "
          "num_key_value_heads: 4, head_dim: 64, intermediate_size: 256, ";
  return {
      "family",
      false,
      "",
      {model("llama", "model_type: llama, attention_bias: true, mlp_bias: true, " + narrow + llama),
       model("gpt2", "model_type: gpt2, resid_pdrop: 0.1, embd_pdrop: 0.1, attn_pdrop: 0.1, " + narrow, {},
             true),
       model("qwen3", "model_type: qwen3, tie_word_embeddings: true, " + narrow + llama, {}, true),
       model("gemma3_text",
             "model_type: gemma3_text, sliding_window: 5, sliding_window_pattern: 2, query_pre_attn_scalar: "
             "9, " +
                 narrow + llama,
             {}, true),
       model("mistral, window", "model_type: mistral, sliding_window: 5, " + narrow + llama),
       model("llama, wide", "model_type: llama, " + wide, {"wide"}),
       model("qwen2_moe",
             "model_type: qwen2_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64, "
             "shared_expert_intermediate_size: 64, norm_topk_prob: true, mlp_only_layers: [0], " +
                 narrow + llama,
             {"experts"}),
       model("qwen3_moe, idle",
             "model_type: qwen3_moe, num_experts: 16, num_experts_per_tok: 1, moe_intermediate_size: 16, " +
                 narrow + llama,
             {"experts"}),
       model("mixtral, wide", "model_type: mixtral, num_local_experts: 4, num_experts_per_tok: 2, " + wide,
             {"experts", "wide"})}};
}

struct Grid {
  int tp = 1, cp = 1, pp = 1;
};

Value grid(const Grid& g, int ranks) {
  const int dp = ranks / (g.tp * g.cp * g.pp);
  Value out{"", {}};
  const auto axis = [&](const char* name, const char* key, int size) {
    if (size == 1) return;
    out.name += fmt::format("{}{} {}", out.name.empty() ? "" : " x ", name, size);
    out.tags.emplace_back(name);
    if (*key) out.keys.push_back(fmt::format("distributed.{}_parallel_size={}", key, size));
  };
  axis("tp", "tensor", g.tp);
  axis("cp", "context", g.cp);
  axis("dp", "", dp);
  axis("pp", "pipeline", g.pp);
  // Gradients are divided over context-parallel ranks as well.
  if (g.cp * dp > 1) out.tags.emplace_back("gradients");
  if (g.cp * dp > 2) out.tags.emplace_back("slices");
  if (g.cp > 2) out.tags.emplace_back("two levels");
  if (ranks / g.pp > 1) out.tags.emplace_back("lanes");
  // Layers for two chunks of every stage.
  if (g.pp > 1) out.keys.push_back(fmt::format("policy.model.num_hidden_layers={}", 2 * g.pp));
  return out;
}

Dimension grids(int ranks) {
  std::vector<Grid> all;
  if (ranks == 2) all = {{}, {.tp = 2}, {.cp = 2}, {.pp = 2}};
  if (ranks == 3) all = {{.pp = 3}, {}};
  if (ranks == 4)
    all = {{},        {.tp = 4},          {.cp = 4},          {.pp = 4},          {.tp = 2},
           {.cp = 2}, {.tp = 2, .cp = 2}, {.tp = 2, .pp = 2}, {.cp = 2, .pp = 2}, {.pp = 2}};
  if (ranks == 8)
    all = {{.tp = 2, .cp = 2, .pp = 2}, {.tp = 2, .pp = 2}, {.tp = 2, .cp = 2}, {.cp = 2, .pp = 2},
           {.tp = 2, .pp = 4},          {.cp = 4},          {.pp = 4}};
  Dimension out{"grid", true, "", {}};
  for (const Grid& g : all) out.values.push_back(grid(g, ranks));
  return out;
}

/// Tags of values with which sums in another order may round to another number.
const std::vector<std::string> rounds{"rounds"};

Keys distributed(const Keys& keys) {
  Keys out;
  for (const std::string& key : keys) out.push_back("distributed." + key);
  return out;
}
Keys policy(const Keys& keys) {
  Keys out;
  for (const std::string& key : keys) out.push_back("policy." + key);
  return out;
}

void add_layouts(int ranks, std::vector<Dimension>& out) {
  const auto dimension = [&](const std::string& name, const std::string& only, std::vector<Value> values) {
    out.push_back({name, true, only, std::move(values)});
  };
  const auto experts = [](int ep, int etp) {
    return distributed(
        {fmt::format("expert_parallel_size={}", ep), fmt::format("expert_tensor_parallel_size={}", etp)});
  };
  const int half = std::max(2, ranks / 2);
  dimension("experts", "lanes experts",
            {{"ep 1", {}},
             {fmt::format("ep {}", half), experts(half, 1), {"exchange"}},
             {fmt::format("etp {}", half), experts(1, half), {"exchange"}}});
  if (ranks >= 4) {
    out.back().values.push_back({"ep 2 x etp 2", experts(2, 2), {"exchange"}});
    out.back().values.push_back({fmt::format("ep {}", ranks), experts(ranks, 1), {"exchange"}});
  }
  dimension("dispatch", "exchange",
            {{"alltoall", policy({"model.moe_token_dispatcher_type=alltoall"})},
             {"allgather", policy({"model.moe_token_dispatcher_type=allgather"})},
             {"rows in rounds", policy({"model.moe_row_slack=0.3"})}});
  const auto overlap = [](bool sequence, const std::string& method, const std::string& splits = "null") {
    return distributed({fmt::format("sequence_parallel={}", sequence), "tp_comm_overlap=" + method,
                        "tp_comm_overlap_splits=" + splits});
  };
  // Three pieces of a rank's rows are unequal; with 100 some ranks have a row in each.
  dimension("tensor", "tp",
            {{"sp", overlap(true, "none")},
             {"no sp", overlap(false, "none")},
             {"sp bulk", overlap(true, "bulk")},
             {"no sp, bulk", overlap(false, "bulk")},
             {"sp ring", overlap(true, "ring")},
             {"sp pipelined 3", overlap(true, "pipelined", "3")},
             {"sp pipelined 100", overlap(true, "pipelined", "100")},
             {"no sp, pipelined 3", overlap(false, "pipelined", "3")}});
  const auto schedule = [](const std::string& name, bool ahead, const Keys& more = {}) {
    Keys keys = distributed({"pipeline_schedule=" + name, fmt::format("overlap_p2p_comm={}", ahead)});
    for (const std::string& key : distributed(more)) keys.push_back(key);
    return keys;
  };
  const std::string two = "virtual_pipeline_size=2";
  dimension(
      "schedule", "pp",
      {{"1f1b", schedule("1f1b", false)},
       {"1f1b ahead", schedule("1f1b", true)},
       {"zb_h1", schedule("zb_h1", false)},
       {"zb_h1 ahead", schedule("zb_h1", true)},
       {"interleaved", schedule("interleaved", false, {two})},
       {"interleaved ahead, groups of 4",
        schedule("interleaved", true, {two, "microbatch_group_size_per_vp_stage=4"})},
       {"uneven stages", schedule("1f1b", false, {"num_layers_in_first_pipeline_stage=1"})},
       {"embedding and loss as layers",
        schedule("auto", false,
                 {"account_for_embedding_in_pipeline_split=true", "account_for_loss_in_pipeline_split=true",
                  "virtual_pipeline_size=null", "pipeline_layout=null"})}});
  std::vector<Value> exchanges;
  for (const std::string type : {"p2p", "all_gather", "a2a"})
    exchanges.push_back({type, distributed({"cp_comm_type=" + type})});
  dimension("context", "cp", exchanges);
  dimension("context levels", "two levels",
            {{"one level", {}},
             {"a2a+p2p", distributed({"cp_comm_type=a2a+p2p", "hierarchical_context_parallel_sizes=[2,2]"})},
             {"a2a+p2p, all_gather", distributed({"cp_comm_type=[a2a+p2p,all_gather]",
                                                  "hierarchical_context_parallel_sizes=[2,2]"})}});
  std::vector<Value> strategies;
  for (const std::string strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
    strategies.push_back({strategy, distributed({"shard_strategy=" + strategy})});
  dimension("strategy", "gradients", strategies);
  dimension("overlap", "gradients",
            {{"reduce", distributed({"overlap_grad_reduce=true"})},
             {"none", distributed({"overlap_grad_reduce=false"})},
             {"reduce, gather", distributed({"overlap_grad_reduce=true", "overlap_param_gather=true"})}});
  dimension("slices", "slices", {{"one", {}}, {"two", distributed({"dp_replicate_size=2"})}});
  dimension("gradients travel in", "gradients",
            {{"fp32", {}},
             {"bf16", distributed({"grad_reduce_dtype=bf16"}), rounds, true},
             {"bf16, fp32 sums",
              distributed({"grad_reduce_dtype=bf16", "grad_reduce_fp32_accumulation=true"}), rounds, true},
             {"fp8", distributed({"grad_reduce_dtype=fp8"}), rounds, true}});
}

void add_features(int ranks, std::vector<Dimension>& out) {
  const auto dimension = [&](const std::string& name, std::vector<Value> values,
                             const std::string& only = "") {
    out.push_back({name, false, only, std::move(values)});
  };
  const auto fp8 = [](const std::string& recipe, const Keys& more = {}) {
    Keys keys = policy({"fp8_cfg.enabled=true", "fp8_cfg.fp8_recipe=" + recipe});
    for (const std::string& key : more) keys.push_back("policy.fp8_cfg." + key);
    return keys;
  };
  // A microbatch has whole blocks of 128 tokens.
  const auto blocks = [&](const std::string& recipe) {
    Keys keys = fp8(recipe);
    keys.push_back("policy.max_total_sequence_length=128");
    return keys;
  };
  const std::vector<std::string> tag{"fp8", "operands", "rounds"};
  dimension("precision",
            {{"fp32", {}, {"fp32"}},
             {"bf16", policy({"precision=bfloat16"}), rounds},
             {"fp16", policy({"precision=float16"}), rounds},
             {"tensorwise", fp8("tensorwise"), tag},
             {"tensorwise, attention", fp8("tensorwise", {"fp8_dot_product_attention=true"}), tag},
             {"delayed", fp8("delayed", {"fp8_amax_history_len=2"}), tag},
             {"blockwise", blocks("blockwise"), tag},
             {"mxfp8", blocks("mxfp8"), {"operands", "rounds"}}});
  dimension("weights", {{"rounded", {}}, {"kept in fp8", policy({"fp8_cfg.fp8_param=true"})}}, "fp8");
  dimension("router",
            {{"plain", {}},
             {"aux_loss, z_loss", policy({"model.moe_aux_loss_coeff=0.3", "model.moe_z_loss_coeff=0.1"})},
             {"seq_aux_loss",
              policy({"model.moe_aux_loss_coeff=0.3", "model.moe_router_load_balancing_type=seq_aux_loss"})},
             {"global_aux_loss, sigmoid",
              policy({"model.moe_aux_loss_coeff=0.3", "model.moe_router_load_balancing_type=global_aux_loss",
                      "model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true",
                      "model.moe_router_num_groups=2", "model.moe_router_group_topk=1",
                      "model.moe_router_topk_scaling_factor=1.5"})},
             {"capacity", policy({"model.moe_expert_capacity_factor=0.8"})},
             {"padded capacity", policy({"model.moe_expert_capacity_factor=0.8",
                                         "model.moe_pad_expert_input_to_capacity=true"})}},
            "experts");
  dimension(
      "recompute",
      {{"none", policy({"recompute.granularity=none"})},
       {"selective", policy({"recompute.granularity=selective"})},
       {"full", policy({"recompute.granularity=full"})},
       {"core_attn, mlp", policy({"recompute.modules=[core_attn,mlp]"})},
       {"norm, gather", policy({"recompute.modules=[norm,gather]"}), {}, false, "tp"},
       {"norm, activation, moe", policy({"recompute.modules=[norm,activation,moe]"}), {}, false, "experts"},
       {"every 2", policy({"checkpoint_every=2"})},
       {"half of the layers", policy({"checkpoint_ratio=0.5"})}});
  dimension("activations in host memory",
            {{"none", {}},
             {"all", policy({"offload_activations=true"})},
             {"half of the layers", policy({"offload_activations=0.5"})},
             {"inputs", policy({"offload_activations=true", "offload_modules=[input]"})},
             {"qkv, core_attn", policy({"offload_activations=true", "offload_modules=[qkv,core_attn]"})}});
  dimension("optimizer in host memory", {{"none", {}},
                                         {"all", policy({"offload_optimizer=true"})},
                                         {"half", policy({"offload_optimizer=0.5"})}});
  const auto formats = [](const Keys& keys) {
    Keys all = policy({"optimizer.use_precision_aware_optimizer=true"});
    for (const std::string& key : keys) all.push_back("policy.optimizer." + key);
    return all;
  };
  dimension("optimizer",
            {{"fp32", {}},
             {"remainders", formats({"store_param_remainders=true"})},
             {"bf16 moments", formats({"exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"}), rounds, true},
             {"fp8 moments", formats({"exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp8"}), rounds, true},
             {"bf16 gradients", formats({"main_grads_dtype=bf16"}), rounds, true, "gradients"}});
  // A layer without adapters, whose activations are kept for nothing else.
  dimension("trained",
            {{"all", {}},
             {"adapters", policy({"lora.enabled=true", "lora.dim=4"})},
             {"some adapters, dropout", policy({"lora.enabled=true", "lora.dim=3", "lora.dropout=0.2",
                                                "lora.exclude_modules=[\"*.0.*\"]"})},
             {"layer 0 frozen", policy({"freeze=[\"*.0.*\"]"})}});
  dimension("clipping",
            {{"off", policy({"max_grad_norm=null"})}, {"on", policy({"max_grad_norm=0.05"}), {}, true}});
  dimension("microbatches",
            {{"8", policy({"train_global_batch_size=8"})},
             {"4 of two", policy({"train_global_batch_size=8", "train_micro_batch_size=2"})},
             {"12", policy({"train_global_batch_size=12"})},
             // Steps of few tokens differ by more than the limits where numbers are rounded.
             {"few", policy({fmt::format("train_global_batch_size={}", ranks)}), {}, false, "fp32"}});
  dimension("documents",
            {{"one", {}},
             {"apart",
              {"data.reset_position_ids=true", "data.reset_attention_mask=true", "data.eod_mask_loss=true"}},
             {"masked", {"data.eod_mask_loss=true"}},
             {"examples", {"algorithm=sft"}, {}, true},
             {"packed", {"algorithm=sft", "policy.sequence_packing.enabled=true"}, {}, true},
             {"batched", {"algorithm=sft", "policy.dynamic_batching.enabled=true"}, {}, true},
             // Roundings are large beside differences of log-probabilities.
             {"pairs",
              {"algorithm=dpo", "policy.sequence_packing.enabled=true", "dpo.sft_weight=0.1"},
              {},
              true,
              "fp32"},
             {"scores", {"algorithm=rm", "rm.center_rewards_coefficient=0.5"}, {}, true, "fp32"},
             {"rollouts",
              {"algorithm=grpo", "policy.sequence_packing.enabled=true", "loss_fn.type=reinforce",
               "loss_fn.entropy_coef=0.01"},
              {},
              true,
              "fp32"},
             {"rollouts of sequences",
              {"algorithm=grpo", "policy.dynamic_batching.enabled=true", "loss_fn.type=gspo"},
              {},
              true,
              "fp32"},
             {"distilled",
              {"algorithm=distill", "distill.topk=5", "policy.sequence_packing.enabled=true"},
              {},
              true,
              "fp32"},
             {"distilled, all tokens",
              {"algorithm=distill", "distill.topk=5", "distill.kl_type=mixed", "distill.temperature=2",
               "distill.zero_outside_topk=true"},
              {},
              true,
              "fp32"}});
}

}  // namespace

std::vector<Dimension> table(int ranks) {
  std::vector<Dimension> out{families()};
  if (ranks > 1) {
    out.push_back(grids(ranks));
    add_layouts(ranks, out);
  }
  add_features(ranks, out);
  // Features are paired with layouts of 2 and 4 ranks.
  if (ranks == 3 || ranks == 8)
    std::erase_if(out, [](const Dimension& d) {
      return !d.layout && d.name != "family" && d.name != "recompute" && d.name != "microbatches";
    });
  return out;
}

const char* const layouts_config =
    "device: cpu\n"
    "policy:\n"
    "  train_micro_batch_size: 1\n"
    "  max_total_sequence_length: 32\n"
    "  tokenizer: {name: bytes}\n"
    "training: {max_steps: 10, seed: 7}\n"
    "distributed: {bucket_size_mb: 0.01}\n"
    "data: {train: {data_path: random-tokens}}\n"
    "kernels: {num_threads: 1, tf32: false}\n";

}  // namespace nrl::test
