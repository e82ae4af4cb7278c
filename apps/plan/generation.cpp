#include "apps/plan/generation.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include "apps/plan/dry_rank.h"
#include "core/base/text.h"

namespace nrl::plan {

std::string GenerationPlan::text() const {
  return fmt::format("up to {} at once, {} pages of {} tokens ({}), buffers {}",
                     counted(limits.sequences, "sequence"), grouped(limits.pages), limits.page_tokens,
                     human_bytes(static_cast<uint64_t>(memory.pages)),
                     human_bytes(static_cast<uint64_t>(memory.buffers)));
}

GenerationPlan plan_generation(const Config& config, const RunPlan& plan, std::optional<int64_t> left) {
  const bool gpu = plan.device == DeviceType::cuda;
  const int64_t dp = plan.position.sizes.dp;
  const int64_t most = std::max(
      (config.rollout.num_prompts_per_step + dp - 1) / dp * config.rollout.num_generations_per_prompt,
      int64_t{1});
  GenerationPlan out;
  out.layout.tensor = plan.layout.tensor;
  out.layout.tensor_rank = plan.layout.tensor_rank;
  model::GenerationLimits& pass = out.limits;
  pass.longest = config.policy.max_total_sequence_length;
  pass.page_tokens = gpu ? 64 : 16;
  pass.sequences = std::min<int64_t>(most, gpu ? 256 : 128);
  pass.tokens = gpu ? 2048 : 512;
  const int64_t of_sequence = (pass.longest + pass.page_tokens - 1) / pass.page_tokens;
  const int64_t page =
      model::GenerationPass::page_bytes(plan.spec, out.layout, pass.page_tokens, plan.recipe.weights());
  out.sequence_bytes = of_sequence * page;
  // One page more for each sequence: a shared prompt's last page is copied.
  pass.pages = pass.sequences * (of_sequence + 1);
  if (left) {
    const int64_t fit = std::max<int64_t>(*left / 2, 0) / page;
    out.fits = fit >= of_sequence;
    pass.pages = std::max(std::min(fit, pass.pages), of_sequence);
  }
  DryRank dry(planned_rank(plan));
  out.memory = model::GenerationPass::memory(plan.spec, plan.parameters, dry.views(), dry.exec(), pass,
                                             out.layout, dry.groups());
  return out;
}

}  // namespace nrl::plan
