#include "core/ops/paged.h"

#include <algorithm>

#include "core/ops/attention.h"
#include "core/ops/paged/blocks.h"
#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

int64_t longest_context(const AttentionPaged& a) {
  const int64_t all = a.block_table.dim(1) * a.page;
  return a.longest > 0 ? std::min(a.longest, all) : all;
}

void check_cache(const char* op, const char* name, const Tensor& t, int64_t width, DType dtype) {
  NRL_CHECK(t.data && t.rank == 2 && t.contiguous() && t.dtype == dtype && t.dim(1) == width,
            "{}: {} is {}, wanted {}[rows, {}]", op, name, describe(t), name_of(dtype), width);
}

}  // namespace

Cost cost(const Exec&, const CacheWrite& a) {
  return {.read = bytes_of(a.keys, a.values, a.slots), .written = bytes_of(a.keys, a.values)};
}

Cost cost(const Exec&, const AttentionPaged& a) {
  const int64_t rows = a.q.dim(0), sequences = std::max<int64_t>(a.context.dim(0), 1),
                longest = longest_context(a);
  const int64_t each = std::min((rows + sequences - 1) / sequences, longest);
  const double pairs = static_cast<double>(sequences) * attention_pairs(each, longest, a.window);
  const double width = static_cast<double>(a.q.dim(1) * a.q.dim(2));
  Cost c{.work = Work::attention};
  c.flops = 4 * width * pairs;
  c.operands = a.q.dtype;
  c.head_dim = a.q.dim(2);
  c.keys = pairs / static_cast<double>(std::max<int64_t>(rows, 1));
  const int64_t seen = a.window > 0 ? std::min(longest, a.window + each - 1) : longest;
  c.read = bytes_of(a.q) +
           2 * static_cast<double>(sequences * seen * a.keys.dim(1) * a.keys.dim(2) * size_of(a.keys.dtype));
  c.written = bytes_of(a.out);
  return c;
}

size_t workspace(const Exec& exec, const AttentionPaged& a) {
  if (exec.on_gpu()) return 0;
  const paged::Block block(a.q.dim(1) / a.keys.dim(1), a.q.dim(2));
  return static_cast<size_t>(exec.threads) * block.bytes() + scratch_alignment;
}

void cache_write(Exec& exec, const CacheWrite& a) {
  if (noted(exec, Kernel::cache_write, a)) return;
  constexpr const char* op = "cache_write";
  NRL_CHECK(a.keys.rank == 2 && is_float(a.keys) && dense_rows(a.keys), "{}: keys are {}", op,
            describe(a.keys));
  NRL_CHECK(same_shape(a.values, a.keys) && a.values.dtype == a.keys.dtype && dense_rows(a.values),
            "{}: values are {}, keys {}", op, describe(a.values), describe(a.keys));
  const int64_t n = a.keys.dim(0), width = a.keys.dim(1);
  NRL_CHECK(n == 0 || is_vector(a.slots, n, DType::i32), "{}: slots are {}, keys {}", op, describe(a.slots),
            describe(a.keys));
  check_cache(op, "key_cache", a.key_cache, width, a.keys.dtype);
  check_cache(op, "value_cache", a.value_cache, width, a.keys.dtype);
  NRL_CHECK(same_shape(a.key_cache, a.value_cache), "{}: caches are {} and {}", op, describe(a.key_cache),
            describe(a.value_cache));
  const trace::Range range = traced(exec, Kernel::cache_write, a);
  if (a.keys.numel() > 0) exec.kernels->cache_write(exec, a);
}

void attention_paged(Exec& exec, const AttentionPaged& a) {
  if (noted(exec, Kernel::attention_paged, a)) return;
  constexpr const char* op = "attention_paged";
  NRL_CHECK((a.q.data || a.q.numel() == 0) && a.q.rank == 3 && is_float(a.q) && dense_rows(a.q) &&
                a.q.dim(1) > 0 && a.q.dim(2) > 0 && a.q.dim(2) <= paged::largest_d,
            "{}: q is {}, wanted f32, bf16 or f16 [rows, heads, D up to {}]", op, describe(a.q),
            paged::largest_d);
  NRL_CHECK(same_shape(a.out, a.q) && a.out.dtype == a.q.dtype && dense_rows(a.out), "{}: out is {}, q {}",
            op, describe(a.out), describe(a.q));
  NRL_CHECK(a.keys.data && a.keys.rank == 3 && a.keys.contiguous() && a.keys.dtype == a.q.dtype &&
                a.keys.dim(2) == a.q.dim(2) && a.keys.dim(1) > 0 && a.q.dim(1) % a.keys.dim(1) == 0,
            "{}: keys are {}, q is {}: D must agree and the heads divide", op, describe(a.keys),
            describe(a.q));
  NRL_CHECK(a.values.data && same_shape(a.values, a.keys) && a.values.contiguous() &&
                a.values.dtype == a.keys.dtype,
            "{}: values are {}, keys {}", op, describe(a.values), describe(a.keys));
  NRL_CHECK(a.page > 0 && a.keys.dim(0) % a.page == 0 && a.window >= 0 && a.longest >= 0,
            "{}: pages of {} in {} rows, window {}, longest {}", op, a.page, a.keys.dim(0), a.window,
            a.longest);
  const int64_t sequences = a.context.dim(0);
  NRL_CHECK(is_vector(a.cu_q, sequences + 1, DType::i32) && is_vector(a.context, sequences, DType::i32) &&
                a.block_table.data && a.block_table.rank == 2 && a.block_table.contiguous() &&
                a.block_table.dtype == DType::i32 && a.block_table.dim(0) == sequences,
            "{}: cu_q is {}, context {}, block_table {}", op, describe(a.cu_q), describe(a.context),
            describe(a.block_table));
  const trace::Range range = traced(exec, Kernel::attention_paged, a);
  if (a.q.numel() > 0) exec.kernels->attention_paged(exec, a);
}

}  // namespace nrl::ops
