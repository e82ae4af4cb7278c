#include "apps/bench/roofline.h"

#include <algorithm>

#include "core/base/text.h"

namespace nrl::bench {
namespace {

std::string name_of(const ops::Call& call) {
  const auto& [rows, columns, inner] = call.cost.gemm;
  if (call.cost.work != ops::Work::gemm) return call.op;
  return fmt::format("{} {} x {} x {}", call.op, rows, columns, inner);
}

}  // namespace

Roofline::Roofline(const plan::Peaks& rates, std::span<const ops::TimedCall> calls, double seconds)
    : rates_(rates), seconds_(seconds) {
  RooflineRow rest;
  rest.part = plan::between_kernels;
  rest.seconds = seconds;
  for (const auto& [call, taken] : calls) {
    const std::string part(plan::part_of(call.op, call.range)), kernel = name_of(call);
    auto row = std::find_if(rows_.begin(), rows_.end(),
                            [&](const auto& r) { return r.part == part && r.kernel == kernel; });
    if (row == rows_.end()) row = rows_.insert(rows_.end(), {.part = part, .kernel = kernel, .calls = 0});
    const ops::Cost& cost = call.cost;
    const plan::Attainable limits = plan::attainable(cost, rates);
    ++row->calls;
    row->flops += cost.flops;
    row->bytes += cost.bytes();
    row->seconds += taken;
    row->attainable += limits.seconds();
    row->surplus += limits.arithmetic - limits.memory;
    rest.seconds -= taken;
  }
  std::stable_sort(rows_.begin(), rows_.end(),
                   [](const auto& a, const auto& b) { return a.lost() > b.lost(); });
  rows_.push_back(rest);
}

std::string Roofline::text() const {
  std::string text = fmt::format(
      "roofline    fp32 {:.0f} GFLOP/s, bf16 {:.0f} GFLOP/s, copies {:.1f} GB/s (measured, of this rank)\n",
      rates_.f32_flops * 1e-9, rates_.bf16_flops * 1e-9, rates_.copy * 1e-9);
  const auto line = [&](auto&&... columns) {
    text += fmt::format("{:<22} {:<44} {:>5} {:>9} {:>9} {:>9} {:>7} {:>11} {:>10} {:>9}  {}", columns...);
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  };
  line("part", "kernel", "calls", "GFLOP", "MB", "ms", "share", "rate", "of limit", "lost ms", "limit");
  const auto number = [](double x, int digits) { return x > 0 ? fmt::format("{:.{}f}", x, digits) : ""; };
  RooflineRow sum;
  for (const RooflineRow& r : rows_) {
    const bool kernel = r.calls > 0;
    line(r.part, r.kernel, kernel ? std::to_string(r.calls) : "", number(r.flops * 1e-9, 2),
         number(r.bytes * 1e-6, 1), fmt::format("{:.2f}", r.seconds * 1e3),
         fmt::format("{:.1f} %", r.seconds / seconds_ * 100),
         !kernel          ? ""
         : r.arithmetic() ? fmt::format("{:.0f} GFLOP/s", r.flops / r.seconds * 1e-9)
                          : fmt::format("{:.1f} GB/s", r.bytes / r.seconds * 1e-9),
         kernel ? fmt::format("{:.0f} %", r.attainable / r.seconds * 100) : "",
         fmt::format("{:.2f}", r.lost() * 1e3),
         !kernel          ? ""
         : r.arithmetic() ? "arithmetic"
                          : "memory");
    sum.flops += r.flops;
    sum.bytes += r.bytes;
    sum.attainable += r.attainable;
  }
  line("sum", "", "", number(sum.flops * 1e-9, 2), number(sum.bytes * 1e-6, 1),
       fmt::format("{:.2f}", seconds_ * 1e3), "", "",
       fmt::format("{:.0f} %", sum.attainable / seconds_ * 100),
       fmt::format("{:.2f}", (seconds_ - sum.attainable) * 1e3), "");
  text.pop_back();
  return text;
}

JsonValue Roofline::json() const {
  std::vector<JsonValue> rows;
  for (const RooflineRow& r : rows_)
    rows.push_back(JsonValue::object({{"part", r.part},
                                      {"kernel", r.kernel},
                                      {"calls", r.calls},
                                      {"flops", r.flops},
                                      {"bytes", r.bytes},
                                      {"seconds", r.seconds},
                                      {"attainable_s", r.attainable},
                                      {"limit", r.calls == 0     ? JsonValue()
                                                : r.arithmetic() ? JsonValue("arithmetic")
                                                                 : JsonValue("memory")}}));
  return JsonValue::object({{"f32_flops_per_s", rates_.f32_flops},
                            {"bf16_flops_per_s", rates_.bf16_flops},
                            {"copy_bytes_per_s", rates_.copy},
                            {"step_s", seconds_},
                            {"rows", JsonValue(std::move(rows))}});
}

}  // namespace nrl::bench
