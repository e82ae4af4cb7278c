#include "apps/train/effect_check.h"

#include <algorithm>

#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/features.h"

namespace nrl::train {

void check_threads_variable(const ConfigResult& result, Diagnostics& out) {
  constexpr std::string_view key = "kernels.num_threads";
  if (!result.config.kernels.num_threads.is_auto() || !result.sound(key)) return;
  const auto invalid = cpu::omp_num_threads().invalid;
  if (!invalid) return;
  out.push_back(diagnose(
      result, key,
      fmt::format("OMP_NUM_THREADS is \"{}\", which is ignored: expected a number from 1 to {}, or a list of "
                  "them (\"4,2\"), of which the first counts",
                  printable(clipped(*invalid, 80)), max_threads),
      "", {"Fix: correct or unset it, or set kernels.num_threads"}, Severity::warning));
}

void check_expert_keys(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  const auto add = [&](const std::string& key, std::string message, const std::vector<std::string>& others,
                       std::string fix) {
    if (!result.origins.contains(key) || !result.sound(key)) return;
    if (!std::all_of(others.begin(), others.end(), [&](const auto& k) { return result.sound(k); })) return;
    out.push_back(without_effect(result, key, key + message, others, {"Fix: " + std::move(fix)}));
  };
  const DistributedConfig& d = result.config.distributed;
  if (spec.moe.experts > 0 && spec.moe.dispatcher == model::TokenDispatcher::allgather &&
      d.expert_parallel_size * d.expert_tensor_parallel_size == 1)
    add("policy.model.moe_token_dispatcher_type",
        ": allgather has no effect: no rank has experts that others lack",
        {"distributed.expert_parallel_size", "distributed.expert_tensor_parallel_size"},
        "remove it, or set distributed.expert_parallel_size above 1");
  if (spec.moe.experts > 0 && spec.moe.aux_loss == 0 && spec.moe.aux_tokens != model::AuxLoss::microbatch)
    add("policy.model.moe_router_load_balancing_type",
        fmt::format(": {} has no effect without policy.model.moe_aux_loss_coeff above 0",
                    spec.moe.aux_name()),
        {"policy.model.moe_aux_loss_coeff"}, "remove it, or set policy.model.moe_aux_loss_coeff");
}

}  // namespace nrl::train
