// The keys of a Hugging Face config.json. Types and ranges are checked here; apps/model interprets them and
// knows which of them a model_type has.
#include "core/base/text.h"
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

void add_rope(PolicyTable& t, const std::string& prefix) {
  t.section("model." + prefix, "Rescaling of the rotary frequencies, for longer contexts.");
  t.formula(prefix + ".rope_type", Kind::choice)
      .one_of({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})
      .alias("policy.model." + prefix + ".type")
      .help("Kind of rescaling of the rotary frequencies.");
  t.model(prefix + ".factor", Kind::number).above(0).help("Rescaling factor.");
  t.model(prefix + ".low_freq_factor", Kind::number)
      .above(0)
      .help("llama3: wavelengths above original / this are scaled.");
  t.model(prefix + ".high_freq_factor", Kind::number)
      .above(0)
      .help("llama3: wavelengths below original / this are kept.");
  t.model(prefix + ".original_max_position_embeddings", Kind::integer)
      .at_least(1)
      .help("Context before rescaling.");
  t.model(prefix + ".attention_factor", Kind::number)
      .nullable()
      .above(0)
      .help("yarn, longrope: scale of cos and sin.");
  t.model(prefix + ".beta_fast", Kind::number).above(0).help("yarn: upper edge of the ramp.");
  t.model(prefix + ".beta_slow", Kind::number).above(0).help("yarn: lower edge of the ramp.");
  t.model(prefix + ".mscale", Kind::number).help("yarn: magnitude scale.");
  t.model(prefix + ".mscale_all_dim", Kind::number).help("yarn: magnitude scale of all dimensions.");
  t.model(prefix + ".truncate", Kind::boolean).help("yarn: round the edges of the ramp.");
  for (const char* which : {"short_factor", "long_factor"})
    t.model(prefix + "." + which, Kind::number).list().above(0).help("longrope: factor per dimension.");
}

// Those of Hugging Face, then Megatron-LM's for training, which transformers ignores.
void add_experts(PolicyTable& t) {
  const auto megatron = [&](const char* name, Kind kind) {
    return t.model(name, kind).alias(std::string("policy.megatron_cfg.") + name);
  };
  const auto router = [&](const char* name, Kind kind) {
    return t.formula(name, kind).alias(std::string("policy.megatron_cfg.") + name);
  };
  t.model("num_local_experts", Kind::integer).at_least(1).help("Experts (Mixtral).");
  t.model("num_experts", Kind::integer)
      .at_least(1)
      .alias("policy.megatron_cfg.num_moe_experts")
      .help("Experts (Qwen).");
  t.formula("num_experts_per_tok", Kind::integer)
      .at_least(1)
      .alias("policy.megatron_cfg.moe_router_topk")
      .help("Experts per token.");
  t.model("moe_intermediate_size", Kind::integer)
      .at_least(1)
      .alias("policy.megatron_cfg.moe_ffn_hidden_size")
      .help("Width inside an expert.");
  t.model("shared_expert_intermediate_size", Kind::integer)
      .at_least(1)
      .alias("policy.megatron_cfg.moe_shared_expert_intermediate_size")
      .help("Width inside the expert that every token passes (Qwen2-MoE).");
  t.formula("norm_topk_prob", Kind::boolean).help("Normalize the chosen experts' weights.");
  t.model("decoder_sparse_step", Kind::integer).at_least(1).help("Every N-th layer has experts.");
  t.model("mlp_only_layers", Kind::integer).list().at_least(0).help("Layers without experts.");
  t.model("router_aux_loss_coef", Kind::number)
      .at_least(0)
      .help("Ignored in a model directory: transformers' loss over all layers (see moe_aux_loss_coeff).");
  t.model("output_router_logits", Kind::boolean).help("Ignored in a model directory.");
  t.model("router_jitter_noise", Kind::number).at_least(0).help("Mixtral: only 0 is supported.");
  router("moe_router_score_function", Kind::choice)
      .one_of({"softmax", "sigmoid"})
      .help("Scores of experts, from the router's logits.");
  router("moe_router_topk_scaling_factor", Kind::number)
      .nullable()
      .above(0)
      .help("Multiplies the weights of the chosen experts.");
  router("moe_router_num_groups", Kind::integer)
      .nullable()
      .at_least(1)
      .help("Groups of consecutive experts, of which a token chooses moe_router_group_topk.");
  router("moe_router_group_topk", Kind::integer)
      .nullable()
      .at_least(1)
      .help(
          "Groups that a token chooses first: those with the largest sums of their num_experts_per_tok / "
          "moe_router_group_topk best scores.");
  megatron("moe_router_enable_expert_bias", Kind::boolean)
      .help(
          "A bias per expert is added to the scores for the choice, and grows while the expert gets fewer "
          "tokens "
          "than the mean: balance without a loss (DeepSeek-V3).");
  router("moe_router_bias_update_rate", Kind::number)
      .at_least(0)
      .help("What a step adds to or takes from each expert's bias; default 0.001.");
  router("moe_router_load_balancing_type", Kind::choice)
      .one_of({"aux_loss", "seq_aux_loss", "global_aux_loss", "none"})
      .help(
          "What moe_aux_loss_coeff weights: the load-balancing loss over the tokens of a microbatch, of each "
          "sequence, or of the microbatches of all data-parallel ranks since the step began.");
  router("moe_aux_loss_coeff", Kind::number)
      .at_least(0)
      .help("Weight of the load-balancing loss of each layer with experts; 0: none.");
  router("moe_z_loss_coeff", Kind::number)
      .nullable()
      .at_least(0)
      .help("Weight of the mean squared logsumexp of router logits; 0: none.");
  router("moe_expert_capacity_factor", Kind::number)
      .nullable()
      .above(0)
      .help(
          "An expert takes this many times the mean number of tokens of a microbatch and drops others; "
          "null: all. Generation drops none.");
  router("moe_pad_expert_input_to_capacity", Kind::boolean)
      .help("All experts compute as many rows as their capacity.");
  router("moe_token_drop_policy", Kind::choice)
      .one_of({"probs", "position"})
      .help("Which tokens an expert drops: those of the lowest weight, or the last.");
  megatron("moe_token_dispatcher_type", Kind::choice)
      .one_of({"alltoall", "allgather"})
      .help(
          "How tokens get to the experts of other ranks (distributed.expert_parallel_size). alltoall: each "
          "to "
          "the ranks of its experts, after the hosts have counted them. allgather: all to all ranks, which "
          "the "
          "host need not wait for.");
  t.model("moe_row_slack", Kind::number)
      .at_least(0)
      .help(
          "Memory for the rows that a rank's experts get by alltoall, over those of a balanced router; "
          "default "
          "1.25. If a rank gets more, all ranks of its expert group work in rounds, with the same results. "
          "0: "
          "memory for all rows that can come.");
}

}  // namespace

void add_model_keys(PolicyTable& t) {
  t.model("model_type", Kind::text)
      .help(fmt::format("Family: {}.", alternatives(EnumNames<ModelFamily>::names)));
  t.model("architectures", Kind::text)
      .list()
      .help("Class name; \"...ForSequenceClassification\" is a reward model, others are ignored.");
  t.model("num_labels", Kind::integer).at_least(1).help("Scores of a ...ForSequenceClassification: 1.");
  t.model("vocab_size", Kind::integer).at_least(1).help("Rows of the embedding.");
  t.model("hidden_size", Kind::integer).at_least(1).help("Width of the residual stream.");
  t.model("intermediate_size", Kind::integer).at_least(1).help("Width inside the MLP.");
  t.model("num_hidden_layers", Kind::integer).at_least(1).help("Layers.");
  t.model("num_attention_heads", Kind::integer)
      .at_least(1)
      .alias("policy.attention_heads")
      .help("Query heads.");
  t.model("num_key_value_heads", Kind::integer)
      .nullable()
      .at_least(1)
      .help("Key and value heads (grouped-query attention).");
  t.model("head_dim", Kind::integer)
      .nullable()
      .at_least(1)
      .alias("policy.attention_head_dim")
      .help("Width of a head.");
  t.formula("hidden_act", Kind::text).help("Activation of the MLP: silu, gelu_pytorch_tanh, ...");
  t.model("hidden_activation", Kind::text).nullable().help("The same under Gemma's name.");
  t.model("max_position_embeddings", Kind::integer).at_least(1).help("Longest context.");
  t.model("initializer_range", Kind::number).above(0).help("Standard deviation of the initial weights.");
  t.formula("rms_norm_eps", Kind::number).above(0).help("Added to the mean square.");
  t.model("layer_norm_epsilon", Kind::number).above(0).help("Added to the variance (GPT-2).");
  t.model("layer_norm_eps", Kind::number).above(0).help("Added to the variance.");
  t.model("use_cache", Kind::boolean).help("For generation; no effect on training.");
  t.model("tie_word_embeddings", Kind::boolean).help("The output projection shares the embedding's weight.");
  t.formula("rope_theta", Kind::number).above(0).help("Base of the rotary frequencies.");
  t.formula("rope_scaling", Kind::text)
      .nullable()
      .help("null: no rescaling of the rotary frequencies; else a mapping.");
  add_rope(t, "rope_scaling");
  t.model("rope_parameters", Kind::text)
      .nullable()
      .help("rope_theta and rope_scaling in one mapping (newer files).");
  add_rope(t, "rope_parameters");
  t.model("rope_parameters.rope_theta", Kind::number).above(0).help("Base of the rotary frequencies.");
  t.formula("partial_rotary_factor", Kind::number).above(0).at_most(1).help("Rotated fraction of a head.");
  t.model("attention_bias", Kind::boolean).help("Biases of the attention matrices.");
  t.model("mlp_bias", Kind::boolean).help("Biases of the MLP matrices.");
  t.model("attention_dropout", Kind::number).at_least(0).below(1).help("Dropout of attention weights.");
  t.model("hidden_dropout", Kind::number).at_least(0).below(1).help("Dropout of the residual stream.");
  t.formula("sliding_window", Kind::integer)
      .nullable()
      .at_least(1)
      .help("Tokens that attention reaches back; null: no window. Default 4096 in mistral and gemma3_text.");
  t.model("use_sliding_window", Kind::boolean).help("Whether sliding_window applies (Qwen).");
  t.model("max_window_layers", Kind::integer).at_least(0).help("Layers before sliding windows begin (Qwen).");
  t.model("sliding_window_pattern", Kind::integer)
      .at_least(1)
      .help("Gemma 3 without layer_types: every N-th layer has no window; default 6.");
  t.formula("rope_local_base_freq", Kind::number)
      .above(0)
      .help("Gemma 3: rope_theta of layers with a sliding window; default 10000.");
  t.model("layer_types", Kind::text).list().nullable().help("Kind of attention of every layer.");
  t.model("pretraining_tp", Kind::integer).at_least(1).help("Ignored.");
  t.model("bos_token_id", Kind::integer).nullable().or_single().at_least(0).help("Token at the beginning.");
  t.model("eos_token_id", Kind::integer)
      .nullable()
      .or_single()
      .at_least(0)
      .help("Token, or tokens, at the end.");
  t.model("pad_token_id", Kind::integer).nullable().at_least(-1).help("Padding token.");
  t.model("torch_dtype", Kind::text).help("Type of stored weights; ignored (see policy.precision).");
  t.model("dtype", Kind::text).help("The same under its newer name.");
  t.model("transformers_version", Kind::text).help("Ignored.");

  t.model("n_embd", Kind::integer).at_least(1).help("GPT-2: width.");
  t.model("n_layer", Kind::integer).at_least(1).help("GPT-2: layers.");
  t.model("n_head", Kind::integer).at_least(1).help("GPT-2: heads.");
  t.model("n_inner", Kind::integer)
      .nullable()
      .at_least(1)
      .help("GPT-2: width inside the MLP; null: 4 x n_embd.");
  t.model("n_positions", Kind::integer).at_least(1).help("GPT-2: longest context.");
  t.model("n_ctx", Kind::integer).at_least(1).help("GPT-2: the same in older files.");
  t.model("activation_function", Kind::text).help("GPT-2: activation of the MLP.");
  t.formula("resid_pdrop", Kind::number).at_least(0).below(1).help("GPT-2: dropout of the residual stream.");
  t.formula("embd_pdrop", Kind::number).at_least(0).below(1).help("GPT-2: dropout of the embeddings.");
  t.formula("attn_pdrop", Kind::number).at_least(0).below(1).help("GPT-2: dropout of attention weights.");
  t.model("scale_attn_weights", Kind::boolean).help("GPT-2: scale by 1/sqrt(head_dim).");
  t.model("scale_attn_by_inverse_layer_idx", Kind::boolean).help("GPT-2: scale by the layer's number too.");
  t.model("reorder_and_upcast_attn", Kind::boolean).help("GPT-2: only false is supported.");

  add_experts(t);
  t.model("query_pre_attn_scalar", Kind::number)
      .above(0)
      .help("Gemma: attention scale is this to the power -1/2.");
  t.model("attn_logit_softcapping", Kind::number)
      .nullable()
      .above(0)
      .help("Gemma 2: soft cap of attention logits.");
  t.model("final_logit_softcapping", Kind::number)
      .nullable()
      .above(0)
      .help("Gemma 2: soft cap of the final logits.");
}

}  // namespace nrl::config_detail
