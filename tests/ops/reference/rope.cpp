#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void rotate(Exec&, const Rope& a) {
  const int64_t heads = a.x.dim(1), half = a.table.dim(1) / 2;
  Amax largest;
  for (int64_t r = 0; r < row_count(a.x); ++r) {
    const int64_t position = index(a.positions, r / heads);
    for (int64_t i = 0; i < half; ++i) {
      const double c = load(a.table, position, i);
      const double s = load(a.table, position, half + i) * (a.inverse ? -1.0 : 1.0);
      const double x1 = load(a.x, r, i), x2 = load(a.x, r, half + i);
      store(a.x, r, i, x1 * c - x2 * s);
      store(a.x, r, half + i, x2 * c + x1 * s);
      largest.add(load(a.x, r, i)), largest.add(load(a.x, r, half + i));
    }
  }
  largest.raise(a.amax);
}

}  // namespace

void fill_rope(KernelTable& table) {
  table.rope = rotate;
}

}  // namespace nrl::ops::reference
