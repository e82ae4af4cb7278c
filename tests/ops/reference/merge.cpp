#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void add(Exec&, const AddRows& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r)
    for (int64_t i = 0; i < a.x.dim(1); ++i)
      store(a.out, r, i, load(a.x, r, i) + (a.accumulate ? load(a.out, r, i) : 0.0));
}

void merge(Exec&, const MergeAttention& a) {
  for (int64_t r = 0; r < a.part.dim(0); ++r)
    for (int64_t h = 0; h < a.part.dim(1); ++h) {
      const double lse = load(a.lse, h, r), part_lse = load(a.part_lse, h, r), m = std::max(lse, part_lse);
      if (std::isinf(m)) continue;
      const double sum = std::exp(lse - m) + std::exp(part_lse - m);
      for (int64_t i = 0; i < a.part.dim(2); ++i) {
        const int64_t out = r * a.out.step(0) + h * a.out.step(1) + i,
                      part = r * a.part.step(0) + h * a.part.step(1) + i;
        store_at(
            a.out, out,
            (load_at(a.out, out) * std::exp(lse - m) + load_at(a.part, part) * std::exp(part_lse - m)) / sum);
      }
      store(a.lse, h, r, m + std::log(sum));
    }
}

}  // namespace

void fill_merge(KernelTable& table) {
  table.add_rows = add;
  table.merge_attention = merge;
}

}  // namespace nrl::ops::reference
