#include "apps/predict/estimate_text.h"

#include <algorithm>
#include <cmath>

#include "apps/plan/parts.h"
#include "core/base/text.h"

namespace nrl::predict {

using plan::between_kernels;

Prediction::Prediction(const machine::DeviceModel& gpu, std::span<const ops::Call> calls,
                       const StepFacts& facts)
    : gpu_(gpu), facts_(facts) {
  const std::span<const std::string_view> order = plan::step_parts();
  for (const std::string_view name : order) parts_.push_back({.name = name});
  const auto part = [&](std::string_view name) -> PredictedPart& {
    const auto at = std::find(order.begin(), order.end(), name);
    NRL_CHECK(at != order.end(), "a step has no part '{}'", name);
    return parts_[at - order.begin()];
  };
  const machine::CallTimes likely(gpu, nullptr), poor(gpu, nullptr, machine::poor),
      good(gpu, nullptr, machine::good);
  PredictedPart& gaps = part(between_kernels);
  for (const ops::Call& call : calls) {
    const std::string_view name = plan::part_of(call.op, call.range);
    PredictedPart& p = part(name.empty() ? plan::other_ops : name);
    const machine::CallTime time = estimate(gpu, call, machine::likely);
    ++p.calls;
    p.bytes += call.cost.bytes() + call.cost.scratch;
    p.flops += call.cost.flops;
    p.arithmetic += time.arithmetic;
    p.memory += time.memory;
    p.seconds += likely.of(call).value;
    poor_ += poor.of(call).value;
    good_ += good.of(call).value;
    gaps.calls += call.cost.launches;
    gaps.seconds += likely.gaps(call);
  }
  poor_ += gaps.seconds;
  good_ += gaps.seconds;
  std::erase_if(parts_, [](const PredictedPart& p) { return p.calls == 0 && p.name != between_kernels; });
  for (const PredictedPart& p : parts_) seconds_ += p.seconds;
}

void Prediction::add(const MeasuredStep& measured) {
  measured_ = measured.step;
  double sum = 0;
  for (const trace::Total& total : measured.parts) {
    const std::string_view name = plan::part_of(total.name, total.parent);
    if (name.empty()) continue;  // a range around ops
    sum += total.seconds;
    auto part = std::find_if(parts_.begin(), parts_.end(), [&](const auto& p) { return p.name == name; });
    if (part == parts_.end()) part = parts_.insert(parts_.end() - 1, {.name = name});  // not predicted
    part->measured += total.seconds;
  }
  parts_.back().measured = measured.step - sum;
}

double Prediction::mfu(double seconds) const {
  return facts_.tokens * facts_.flops_per_token / seconds / gpu_.bf16_flops();
}

std::string Prediction::text() const {
  std::string text = machine::assumptions(gpu_) + "\n";
  const auto line = [&](std::string_view name, const std::string& calls, const std::string& bytes,
                        const std::string& flops, const std::string& ms, const std::string& share,
                        const std::string& measured, std::string_view limit) {
    text += fmt::format("{:<22} {:>6} {:>9} {:>9} {:>10} {:>7}{}   {}", name, calls, bytes, flops, ms, share,
                        measured_ ? fmt::format(" {:>20}", measured) : "", limit);
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  };
  // Milliseconds, and their ratio to the estimate.
  const auto measured = [](double seconds, double predicted) {
    const double ratio = predicted > 0 ? seconds / predicted : 0;
    const std::string text =
        std::abs(ratio) < 100 ? fmt::format("{:.2f}", ratio) : std::to_string(std::llround(ratio));
    return fmt::format("{:.2f} {:>8}", seconds * 1e3, text);
  };
  line("part of a step", "calls", "GB", "TFLOP", "est. ms", "share",
       fmt::format("measured ms {:>8}", "ratio"), "limit");
  PredictedPart sum;
  for (const PredictedPart& p : parts_) {
    const bool gap = p.name == between_kernels;
    sum.bytes += p.bytes;
    sum.flops += p.flops;
    line(p.name, std::to_string(p.calls), gap ? "" : fmt::format("{:.2f}", p.bytes * 1e-9),
         p.flops > 0 ? fmt::format("{:.2f}", p.flops * 1e-12) : "", fmt::format("{:.2f}", p.seconds * 1e3),
         fmt::format("{:.1f} %", p.seconds / seconds_ * 100), measured(p.measured, p.seconds),
         gap                       ? "launches"
         : p.arithmetic > p.memory ? "arithmetic"
                                   : "memory");
  }
  line("sum", "", fmt::format("{:.2f}", sum.bytes * 1e-9), fmt::format("{:.2f}", sum.flops * 1e-12),
       fmt::format("{:.2f}", seconds_ * 1e3), "", measured_ ? measured(*measured_, seconds_) : "", "");
  const auto speed = [&](double seconds) { return grouped(std::llround(facts_.tokens / seconds)); };
  text += fmt::format("estimate    {:.2f} ms per step ({:.2f} with poor rates, {:.2f} with good ones)\n",
                      seconds_ * 1e3, poor_ * 1e3, good_ * 1e3);
  text += fmt::format("estimate    {} tokens/s, mfu {:.1f} % ({:.1f} %, {:.1f} %)\n", speed(seconds_),
                      mfu(seconds_) * 100, mfu(poor_) * 100, mfu(good_) * 100);
  text +=
      fmt::format("memory      {} planned of {}", human_bytes(static_cast<uint64_t>(facts_.planned_bytes)),
                  human_bytes(static_cast<uint64_t>(gpu_.memory)));
  if (static_cast<double>(facts_.planned_bytes) > gpu_.memory) text += ": does not fit";
  return text;
}

JsonValue Prediction::json() const {
  std::vector<JsonValue> parts;
  for (const PredictedPart& p : parts_)
    parts.push_back(JsonValue::object({{"name", std::string(p.name)},
                                       {"calls", p.calls},
                                       {"bytes", p.bytes},
                                       {"flops", p.flops},
                                       {"estimated_s", p.seconds},
                                       {"measured_s", measured_ ? JsonValue(p.measured) : JsonValue()}}));
  return JsonValue::object({{"gpu", std::string(gpu_.name)},
                            {"assumed_peak_flops", gpu_.bf16_flops()},
                            {"assumed_copy_bytes_per_s", gpu_.copy},
                            {"estimated_s", seconds_},
                            {"estimated_good_s", good_},
                            {"estimated_poor_s", poor_},
                            {"estimated_mfu", mfu(seconds_)},
                            {"measured_s", measured_ ? JsonValue(*measured_) : JsonValue()},
                            {"parts", JsonValue(std::move(parts))}});
}

}  // namespace nrl::predict
