// Rules about models that train on examples of different lengths.
#include <algorithm>

#include "apps/check/rule.h"

namespace nrl::check {
namespace {

/// A mask depends on the place of its row, which packing changes.
Verdict judge_dropout(const Facts& f) {
  const model::ModelSpec& m = f.spec();
  if (!trains_on_examples(f.config())) return {};
  if (const auto& lora = f.policy().lora; lora.enabled && lora.dropout > 0)
    return {{fmt::format("algorithm {} is not supported with dropout yet: policy.lora.dropout is {:g}",
                         name_of(f.config().algorithm), lora.dropout),
             {"set it to 0"}}};
  const float most = std::max({m.residual_dropout, m.embedding_dropout, m.attention_dropout});
  if (most == 0) return {};
  const char* keys = m.family == ModelFamily::gpt2 ? "policy.model.resid_pdrop, embd_pdrop and attn_pdrop"
                                                   : "policy.model.attention_dropout";
  return {{fmt::format("algorithm {} is not supported with dropout yet: the model has a dropout of {:g}",
                       name_of(f.config().algorithm), most),
           {fmt::format("set {} to 0", keys)}}};
}

/// Rows of padding would be routed to experts, and count in their losses.
Verdict judge_experts(const Facts& f) {
  const DistributedConfig& d = f.distributed();
  if (!trains_on_examples(f.config()) || f.spec().moe.experts == 0) return {};
  const auto refuse = [&](std::string why, std::string fix) {
    return Verdict{{fmt::format("algorithm {} of a model with experts is not supported {} yet",
                                name_of(f.config().algorithm), why),
                    {std::move(fix)}}};
  };
  if (f.gpu) return refuse("on a GPU, where microbatches are padded to one length,", "use device: cpu");
  if (f.spec().moe.aux_loss > 0)
    return refuse("with an auxiliary loss, which compares the tokens of a sequence or of microbatches,",
                  "set policy.model.moe_aux_loss_coeff to 0");
  if (f.spec().moe.capacity_factor > 0)
    return refuse("with policy.model.moe_expert_capacity_factor, which drops tokens of a microbatch,",
                  "set it to null");
  if (d.expert_parallel_size * d.expert_tensor_parallel_size > 1)
    return refuse("with experts on several ranks, whose microbatches have different lengths,",
                  "set distributed.expert_parallel_size and expert_tensor_parallel_size to 1");
  if (d.context_parallel_size > 1)
    return refuse("with context parallelism", "set distributed.context_parallel_size to 1");
  if (d.splits_sequence())
    return refuse("with sequence parallelism", "set distributed.sequence_parallel to false");
  if (f.policy().fp8_cfg.enabled) return refuse("in FP8", "set policy.fp8_cfg.enabled to false");
  return {};
}

Verdict judge_topk(const Facts& f) {
  const int64_t topk = f.config().distillation.topk, vocabulary = f.spec().vocab_size;
  if (f.config().algorithm != Algorithm::distill || topk <= vocabulary) return {};
  return {{fmt::format("distill.topk: {} ids of a token, but the vocabulary has {}", topk, vocabulary),
           {fmt::format("set distill.topk to {} or less", vocabulary)}}};
}

const Rule example_table[] = {
    {{"algorithm", "policy.lora.dropout"}, judge_dropout},
    {{"algorithm", "distributed.expert_parallel_size", "distributed.context_parallel_size",
      "distributed.tensor_parallel_size"},
     judge_experts},
    {{"distill.topk", "algorithm"}, judge_topk},
};

}  // namespace

std::span<const Rule> example_rules() {
  return example_table;
}

}  // namespace nrl::check
