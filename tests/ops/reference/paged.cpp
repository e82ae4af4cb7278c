// A paged cache in scalar double precision, for tests.

#include <cstring>

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void write_cache(Exec&, const CacheWrite& a) {
  for (int64_t n = 0; n < a.keys.dim(0); ++n) {
    const int64_t slot = index(a.slots, n);
    if (slot < 0) continue;
    for (int64_t i = 0; i < a.keys.dim(1); ++i) {
      store(a.key_cache, slot, i, load(a.keys, n, i));
      store(a.value_cache, slot, i, load(a.values, n, i));
    }
  }
}

double element(const Tensor& t, int64_t row, int64_t head, int64_t i) {
  return load_at(t, row * t.step(0) + head * t.step(1) + i * t.step(2));
}

void attend_to_pages(Exec&, const AttentionPaged& a) {
  const int64_t heads = a.q.dim(1), group = heads / a.keys.dim(1), d = a.q.dim(2),
                width = a.block_table.dim(1);
  for (int64_t s = 0; s < a.context.dim(0); ++s) {
    const int64_t end = index(a.cu_q, s + 1), begin = index(a.cu_q, s), context = index(a.context, s);
    const auto* pages = static_cast<const int32_t*>(a.block_table.data) + s * width;
    const auto row_of = [&](int64_t token) { return pages[token / a.page] * a.page + token % a.page; };
    for (int64_t row = begin; row < end; ++row) {
      const int64_t position = context - (end - row);
      const int64_t first = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
      for (int64_t head = 0; head < heads; ++head) {
        std::vector<double> scores;
        double most = -INFINITY, sum = 0;
        for (int64_t j = first; j <= position; ++j) {
          double product = 0;
          for (int64_t i = 0; i < d; ++i)
            product += element(a.q, row, head, i) * element(a.keys, row_of(j), head / group, i);
          scores.push_back(static_cast<double>(a.scale) * product);
          most = std::max(most, scores.back());
        }
        for (double& x : scores) sum += x = std::exp(x - most);
        for (int64_t i = 0; i < d; ++i) {
          double out = 0;
          for (int64_t j = first; j <= position; ++j)
            out += scores[static_cast<size_t>(j - first)] * element(a.values, row_of(j), head / group, i);
          store_at(a.out, row * a.out.step(0) + head * a.out.step(1) + i * a.out.step(2), out / sum);
        }
      }
    }
  }
}

}  // namespace

void fill_paged(KernelTable& table) {
  table.cache_write = write_cache;
  table.attention_paged = attend_to_pages;
}

}  // namespace nrl::ops::reference
