#include "apps/check/check.h"

#include <algorithm>

#include "apps/check/rule.h"
#include "apps/plan/pipeline.h"

namespace nrl::check {
namespace {

const Rule on_oom{{"memory.on_oom"}, [](const Facts& f) -> Verdict {
                    const std::string why = microbatch_dependence(f.spec());
                    if (f.config().memory.on_oom != OnOom::reduce_batch || why.empty()) return {};
                    return {{.reason = fmt::format(
                                 "memory.on_oom: reduce_batch would change the training, because {}", why),
                             .remedy = {"use fail and choose train_micro_batch_size, or "
                                        "policy.model.moe_router_load_balancing_type: seq_aux_loss without a "
                                        "capacity"}}};
                  }};

// bf16 logits on a CPU, for which no memory can be planned. The ranks check what depends on their devices
// later (validate_for_device()), in the same words.
Diagnostics check_logits(const Facts& f) {
  if (f.policy().logits_dtype != LogitsDType::bfloat16 || f.config().device != DeviceKind::automatic)
    return {};
  Diagnostics found = validate_for_device(f.result, {.gpu = f.gpu, .why = f.why_no_gpu});
  std::erase_if(found, [](const Diagnostic& d) { return d.key != "policy.logits_dtype"; });
  return found;
}

}  // namespace

Diagnostics check_model(const Facts& facts) {
  Diagnostics out = judge(size_rules(), facts);
  out += judge(context_rules(), facts);
  out += plan::check_pipeline(facts.result, facts.spec().layers);
  out += judge(expert_rules(), facts);
  out += judge(example_rules(), facts);
  out += judge(head_rules(), facts);
  out += judge(layer_rules(), facts);
  out += check_logits(facts);
  out += judge({&on_oom, 1}, facts);
  out += check_fp8(facts);
  return out;
}

std::string microbatch_dependence(const model::ModelSpec& spec) {
  const model::MoeSpec& moe = spec.moe;
  if (moe.experts == 0) return "";
  if (moe.capacity_factor > 0) return "policy.model.moe_expert_capacity_factor drops tokens of a microbatch";
  if (moe.aux_loss > 0 && moe.aux_tokens != model::AuxLoss::sequence)
    return "the load-balancing loss compares the tokens of a microbatch";
  return "";
}

}  // namespace nrl::check
