#include "apps/planner/what_if.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::planner {

Variant variant_of(std::string name, PlannedRun& run) {
  Variant out{.name = std::move(name)};
  const RankPlans plans = plan_all(run.result, run.world, run.batch, run.device, run.gpu);
  out.estimate = estimate_run(run);
  out.memory = plans.largest().memory.total_bytes();
  out.capacity = static_cast<int64_t>(run.device.memory);
  out.json = json_of(run, plans, out.estimate);
  return out;
}

Variant variant_of(const PlanRequest& base, const std::string& keys) {
  PlanRequest request = base;
  std::istringstream words(keys);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos)
      fail(Exit::usage, "--what-if: '{}' is not KEY=VALUE. Fix: --what-if \"KEY=VALUE KEY=VALUE\"", word);
    if (word.starts_with("device="))
      request.device = word.substr(equals + 1);
    else if (word.starts_with("trainer="))
      request.trainer = word.substr(equals + 1);
    else
      request.overrides.push_back(word);
  }
  if (request.overrides.size() == base.overrides.size() && request.device == base.device &&
      request.trainer == base.trainer)
    fail(Exit::usage, "--what-if '{}' changes nothing. Fix: --what-if KEY=VALUE", keys);
  PlannedRun run = prepare(request);
  if (run.complete) return variant_of(keys, run);
  Variant out{.name = keys};
  const auto& all = run.result.diagnostics;
  const auto error =
      std::find_if(all.begin(), all.end(), [](const Diagnostic& d) { return d.severity == Severity::error; });
  out.refused = error == all.end() ? "" : error->message;
  return out;
}

std::string table(const std::vector<Variant>& variants) {
  size_t width = 8;
  for (const Variant& v : variants) width = std::max(width, v.name.size());
  const bool gpu = !variants.empty() && variants.front().estimate.gpu;
  std::string text =
      fmt::format("{:<{}} {:>10} {:>12} {:>11} {:>8} {:>8}   {}\n", "what if", width, "step ms", "tokens/s",
                  "memory", "exposed", "bubble", gpu ? "GPU h / 10^9 tokens" : "rank h / 10^9 tokens");
  for (const Variant& v : variants) {
    if (!v.refused.empty()) {
      text += fmt::format("{:<{}} refused: {}\n", v.name, width, v.refused);
      continue;
    }
    const RunEstimate& e = v.estimate;
    const std::string memory = human_bytes(static_cast<uint64_t>(v.memory));
    if (!e.unknown.empty()) {
      text += fmt::format("{:<{}} {:>10} {:>12} {:>11}   no estimate: {}\n", v.name, width, "", "", memory,
                          e.unknown);
      continue;
    }
    const auto share = [&](double seconds) { return fmt::format("{:.1f} %", 100 * seconds / e.likely.step); };
    text += fmt::format(
        "{:<{}} {:>10} {:>12} {:>11} {:>8} {:>8}   {:<9}{}", v.name, width,
        fmt::format("{:.1f}", e.likely.step * 1e3), grouped(std::llround(e.tokens_per_second())), memory,
        share(e.likely.layers + e.likely.data + e.likely.offload), share(e.likely.pipeline),
        fmt::format("{:.4g}", e.rank_hours()), v.capacity > 0 && v.memory > v.capacity ? "does not fit" : "");
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  }
  text.pop_back();
  return text;
}

}  // namespace nrl::planner
