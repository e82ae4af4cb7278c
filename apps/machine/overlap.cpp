#include "apps/machine/overlap.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/sample.h"

namespace nrl::machine {
namespace {

constexpr std::array works{ops::Work::memory, ops::Work::gemm, ops::Work::attention};

Sharing median_of(std::span<const MeasuredOverlap> measured) {
  std::vector<double> calls, operations;
  for (const MeasuredOverlap& m : measured) {
    // Faster together than alone is noise.
    calls.push_back(std::max(m.slowdown, 1.0));
    operations.push_back(std::max(m.comm_slowdown, 1.0));
  }
  return {median(std::move(calls)), median(std::move(operations))};
}

template <class Condition>
std::vector<MeasuredOverlap> those(std::span<const MeasuredOverlap> measured, const Condition& condition) {
  std::vector<MeasuredOverlap> out;
  std::copy_if(measured.begin(), measured.end(), std::back_inserter(out), condition);
  return out;
}

}  // namespace

Overlap::Overlap(const Sharing& assumed) : rows_(1), any_(!(assumed == Sharing{})) {
  rows_.front().fill(assumed);
}

Overlap::Overlap(const Sharing& gemms, const Sharing& others, bool layers_apart)
    : rows_(works.size()), any_(!(gemms == Sharing{} && others == Sharing{})), layers_apart_(layers_apart) {
  for (const ops::Work work : works)
    rows_[static_cast<size_t>(work)].fill(work == ops::Work::gemm ? gemms : others);
}

Overlap::Overlap(std::span<const MeasuredOverlap> measured) {
  NRL_CHECK(!measured.empty(), "no overlap was measured");
  for (const ops::Work work : works) {
    const auto of_work = those(measured, [&](const MeasuredOverlap& m) { return m.work == work; });
    add(of_work.empty() ? measured : of_work);
  }
  for (const MeasuredOverlap& m : measured)
    if (ops_.try_emplace(m.op, static_cast<Row>(rows_.size())).second)
      add(those(measured, [&](const MeasuredOverlap& other) { return other.op == m.op; }));
}

void Overlap::add(std::span<const MeasuredOverlap> measured) {
  Factors& row = rows_.emplace_back();
  row.fill(median_of(measured));
  for (size_t i = 0; i < row.size(); ++i) {
    const auto op = static_cast<comm::Op>(i);
    const auto of_op = those(measured, [&](const MeasuredOverlap& m) { return m.comm == op; });
    if (!of_op.empty()) row[i] = median_of(of_op);
    any_ = any_ || !(row[i] == Sharing{});
  }
}

Overlap::Row Overlap::row(std::string_view op, ops::Work work) const {
  if (rows_.size() == 1) return 0;
  const auto found = ops_.find(op);
  return found == ops_.end() ? static_cast<Row>(work) : found->second;
}

}  // namespace nrl::machine
