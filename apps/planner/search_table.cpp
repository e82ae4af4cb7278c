#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include "apps/planner/search.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

std::string alternatives_text(const Result& result, int world) {
  const Found& first = result.found.front();
  std::string text;
  for (const Alternative& a : result.alternatives) {
    text += fmt::format("\nwithout  {}: ", a.without);
    if (!a.found) {
      text += "no layout fits";
      continue;
    }
    const int64_t more = a.found->memory - first.memory;
    text += fmt::format("{:+.1f} %, {} {}: {}", 100 * (a.found->value / first.value - 1),
                        human_bytes(static_cast<uint64_t>(std::abs(more))), more < 0 ? "less" : "more",
                        a.found->layout.name(world));
  }
  return text;
}

}  // namespace

std::string table(const Result& result, const predict::ModeledDevice& device, int world,
                  double flops_per_token, size_t shown, Objective objective, std::string_view trainer) {
  const machine::DeviceModel& model = device.model();
  const double peak = model.bf16_flops() * world;
  std::string text = fmt::format("search   {} of {} fit; {} planned in full; times are estimates {}{}\n",
                                 grouped(static_cast<int64_t>(result.tried - result.too_large)),
                                 counted(static_cast<int64_t>(result.tried), "layout"), result.planned,
                                 device.profile() ? "with the rates of the profile" : "at assumed rates",
                                 trainer.empty() ? "" : fmt::format(", with the kernels of {}", trainer));
  size_t width = 0;
  for (size_t i = 0; i < std::min(shown, result.found.size()); ++i)
    width = std::max(width, result.found[i].layout.name(world).size());
  const bool copies = std::any_of(result.found.begin(), result.found.end(),
                                  [](const Found& f) { return f.estimate.offload > 0; });
  const std::string unit = objective == Objective::time   ? ""
                           : objective == Objective::cost ? "   price / 10^9 tokens"
                                                          : "   kWh / 10^9 tokens";
  text += fmt::format("  {:<{}} {:>10} {:>10} {:>11} {:>5} {:>9} {:>8} {:>8} {:>8}{}{}\n", "layout", width,
                      "memory", "step ms", "tokens/s", "mfu", "compute", "layers", "bubble", "data",
                      copies ? "  offload" : "", unit);
  for (size_t i = 0; i < std::min(shown, result.found.size()); ++i) {
    const Found& f = result.found[i];
    const double step = f.estimate.step, rate = static_cast<double>(f.tokens) / step;
    const auto share = [&](double seconds) { return fmt::format("{:.1f} %", 100 * seconds / step); };
    const std::string value =
        unit.empty()
            ? ""
            : fmt::format("{:>{}}", fmt::format("{:.4g}", 1e9 * f.value / static_cast<double>(f.tokens)),
                          unit.size());
    text += fmt::format("  {:<{}} {:>10} {:>10.1f} {:>11} {:>5.1f} {:>9} {:>8} {:>8} {:>8}{}{}\n",
                        f.layout.name(world), width, human_bytes(static_cast<uint64_t>(f.memory)), step * 1e3,
                        grouped(std::llround(rate)), 100 * rate * flops_per_token / peak,
                        share(f.estimate.computing()), share(f.estimate.layers), share(f.estimate.pipeline),
                        share(f.estimate.data),
                        copies ? fmt::format(" {:>8}", share(f.estimate.offload)) : "", value);
  }
  text += "use      " + fmt::format("{}", fmt::join(result.found.front().keys, " "));
  return text + alternatives_text(result, world);
}

}  // namespace nrl::planner
