// Texts of a plan for reports (run_plan.h).

#include <numeric>

#include "apps/plan/run_plan.h"
#include "core/base/text.h"

namespace nrl::plan {

using memory::Category;

std::string fp8_text(const Config& config, const RunPlan& plan) {
  if (!plan.recipe.quantizes_any()) return "";
  const precision::QuantizedGemms& gemms = plan.recipe.quantized();
  std::string text = fmt::format("fp8 {}", name_of(config.policy.fp8_cfg.fp8_recipe));
  if (gemms.begin > 0 || gemms.end < plan.spec.layers)
    text += gemms.end - gemms.begin == 1 ? fmt::format(" in layer {}", gemms.begin)
                                         : fmt::format(" in layers {}-{}", gemms.begin, gemms.end - 1);
  return text;
}

std::string recompute_text(const RunPlan& plan) {
  const std::vector<bool> held = model::held_blocks(plan.layout, plan.spec.layers);
  std::vector<int> blocks;
  for (int b = 0; b < static_cast<int>(plan.recompute.size()); ++b)
    if (plan.recompute_reason.empty() || held[b]) blocks.push_back(b);
  std::string text = model::recompute_text(plan.recompute, blocks);
  if (text.empty() && !plan.recompute_reason.empty()) text = "nothing";
  return text + (plan.recompute_reason.empty() ? "" : ": " + plan.recompute_reason);
}

std::string offload_text(const RunPlan& plan) {
  std::vector<int> blocks(plan.offload.size());
  std::iota(blocks.begin(), blocks.end(), 0);
  return model::offload_text(plan.offload, blocks);
}

std::string memory_line(const memory::MemoryPlan& plan) {
  std::string text;
  for (int c = 0; c < memory::category_count; ++c) {
    const auto category = static_cast<Category>(c);
    if (plan.bytes(category) > 0)
      text +=
          fmt::format("{} {}  ", name_of(category), human_bytes(static_cast<uint64_t>(plan.bytes(category))));
  }
  text += "= " + human_bytes(static_cast<uint64_t>(plan.total_bytes()));
  if (const int64_t offloaded = plan.bytes(memory::Tier::host); offloaded > 0)
    text += fmt::format(", offloaded {}", human_bytes(static_cast<uint64_t>(offloaded)));
  return text;
}

}  // namespace nrl::plan
