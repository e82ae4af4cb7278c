#include "core/base/philox.h"
#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void drop(Exec&, const Dropout& a) {
  const PhiloxStream random(a.seed, dropout_stream(a.stream, static_cast<const int64_t*>(a.step.data)));
  const int64_t h = a.x.dim(1), width = a.width > 0 ? a.width : h;
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    const int64_t row = a.first_row + (a.rows ? index(a.rows, r) : r);
    for (int64_t i = 0; i < h; ++i) {
      const bool keep = random.uniform(static_cast<uint64_t>(row * width + a.first_column + i)) >= a.p;
      const double dropped = keep ? load(a.x, r, i) / (1.0 - static_cast<double>(a.p)) : 0.0;
      store(a.out, r, i, dropped + (a.residual ? load(a.residual, r, i) : 0.0));
    }
  }
}

}  // namespace

void fill_dropout(KernelTable& table) {
  table.dropout = drop;
}

}  // namespace nrl::ops::reference
