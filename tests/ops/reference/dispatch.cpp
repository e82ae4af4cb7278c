#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void sort(Exec&, const DispatchSort& a) {
  const int64_t experts = a.offsets.dim(0) - 1;
  auto* offsets = static_cast<int32_t*>(a.offsets.data);
  auto* row = static_cast<int32_t*>(a.row.data);
  auto* source = static_cast<int32_t*>(a.source.data);
  std::fill_n(source, a.source.dim(0), -1);
  std::fill_n(row, a.row.numel(), -1);
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    std::vector<int32_t> own;
    for (int64_t i = 0; i < a.expert.numel(); ++i)
      if (static_cast<const int32_t*>(a.expert.data)[i] == a.first + e)
        own.push_back(static_cast<int32_t>(i));
    if (a.capacity > 0 && static_cast<int64_t>(own.size()) > a.capacity) {
      if (a.prob)
        std::stable_sort(own.begin(), own.end(),
                         [&](int32_t x, int32_t y) { return load_at(a.prob, x) > load_at(a.prob, y); });
      own.resize(static_cast<size_t>(a.capacity));
      std::sort(own.begin(), own.end());
    }
    for (size_t i = 0; i < own.size(); ++i) {
      row[own[i]] = offsets[e] + static_cast<int32_t>(i);
      source[row[own[i]]] = own[i];
    }
    offsets[e + 1] = offsets[e] + static_cast<int32_t>(a.pad ? a.capacity : static_cast<int64_t>(own.size()));
  }
}

void permute(Exec&, const Permute& a) {
  for (int64_t r = 0; r < a.source.dim(0); ++r) {
    const auto entry = static_cast<int64_t>(load(a.source, r));
    for (int64_t i = 0; i < a.x.dim(1); ++i)
      store(a.out, r, i, entry < 0 ? 0.0 : load(a.x, entry / a.top_k, i));
  }
}

void regroup(Exec&, const RegroupRows& a) {
  for (int64_t g = 0; g < a.place.dim(0); ++g) {
    const auto begin = static_cast<int64_t>(load(a.begin, g)), place = static_cast<int64_t>(load(a.place, g));
    for (int64_t i = 0; i < static_cast<int64_t>(load(a.begin, g + 1)) - begin; ++i)
      for (int64_t j = 0; j < a.x.dim(1); ++j)
        store(a.out, (a.placed_in ? begin : place) + i, j, load(a.x, (a.placed_in ? place : begin) + i, j));
  }
}

void unpermute(Exec&, const Unpermute& a) {
  const int64_t k = (a.row ? a.row : a.prob).dim(1);
  for (int64_t t = 0; t < a.out.dim(0); ++t)
    for (int64_t i = 0; i < a.x.dim(1); ++i) {
      double sum = a.addend ? load(a.addend, t, i) : 0.0;
      for (int64_t c = 0; c < k; ++c) {
        const auto r = a.row ? static_cast<int64_t>(load(a.row, t, c)) : t * k + c;
        if (r >= 0) sum += (a.prob ? load(a.prob, t, c) : 1.0) * load(a.x, r, i);
      }
      store(a.out, t, i, sum);
    }
}

void gate(Exec&, const GateBackward& a) {
  const int64_t k = a.prob.dim(1);
  for (int64_t t = 0; t < a.prob.dim(0); ++t)
    for (int64_t c = 0; c < k; ++c) {
      const auto r = a.row ? static_cast<int64_t>(load(a.row, t, c)) : t * k + c;
      const double p = load(a.prob, t, c);
      double dot = 0;
      for (int64_t i = 0; r >= 0 && i < a.act.dim(1); ++i) {
        const double act = load(a.act, r, i), dact = load(a.dact, r, i);
        dot += act * dact;
        store(a.dact_out, r, i, p * dact);
        store(a.act_out, r, i, p * act);
      }
      store(a.dprob, t, c, dot);
    }
}

}  // namespace

void fill_dispatch(KernelTable& table) {
  table.dispatch_sort = sort;
  table.permute = permute;
  table.regroup_rows = regroup;
  table.unpermute = unpermute;
  table.gate_backward = gate;
}

}  // namespace nrl::ops::reference
