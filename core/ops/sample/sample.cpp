#include "core/ops/sample.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {

Cost cost(const Exec&, const SampleTokens& a) {
  return {.read = bytes_of(a.logits, a.temperature, a.seed, a.sample, a.position),
          .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const JoinSamples& a) {
  return {.read = bytes_of(a.parts), .written = bytes_of(a.token, a.log_prob)};
}

void sample_tokens(Exec& exec, const SampleTokens& a) {
  if (noted(exec, Kernel::sample_tokens, a)) return;
  constexpr const char* op = "sample_tokens";
  constexpr int64_t most_tokens = int64_t{1} << 24;  // exact in f32
  NRL_CHECK(a.logits.data && a.logits.rank == 2 && a.logits.dtype == DType::f32 && dense_rows(a.logits) &&
                a.logits.dim(1) > 0 && a.first_column >= 0 &&
                a.first_column + a.logits.dim(1) <= most_tokens && a.tokens > 0,
            "{}: logits are {}, from token {}, {} tokens; wanted f32[rows, V], at most {} tokens", op,
            describe(a.logits), a.first_column, a.tokens, most_tokens);
  const int64_t n = a.logits.dim(0);
  NRL_CHECK(is_vector(a.temperature, n, DType::f32) && is_vector(a.seed, n, DType::i64) &&
                is_vector(a.sample, n, DType::i64) && is_vector(a.position, n, DType::i32),
            "{}: {} rows; temperature {}, seed {}, sample {}, position {}", op, n, describe(a.temperature),
            describe(a.seed), describe(a.sample), describe(a.position));
  NRL_CHECK(a.out.data && a.out.rank == 2 && a.out.dim(0) == n && a.out.dim(1) == SamplePart::columns &&
                a.out.dtype == DType::f32 && a.out.contiguous(),
            "{}: out is {}, wanted f32[{}, {}]", op, describe(a.out), n, +SamplePart::columns);
  const trace::Range range = traced(exec, Kernel::sample_tokens, a);
  if (n > 0) exec.kernels->sample_tokens(exec, a);
}

void join_samples(Exec& exec, const JoinSamples& a) {
  if (noted(exec, Kernel::join_samples, a)) return;
  constexpr const char* op = "join_samples";
  NRL_CHECK(a.parts.data && a.parts.rank == 3 && a.parts.dim(0) > 0 &&
                a.parts.dim(2) == SamplePart::columns && a.parts.dtype == DType::f32 && a.parts.contiguous(),
            "{}: parts are {}, wanted f32[slices, rows, {}]", op, describe(a.parts), +SamplePart::columns);
  const int64_t n = a.parts.dim(1);
  NRL_CHECK(is_vector(a.token, n, DType::i32) && is_vector(a.log_prob, n, DType::f32),
            "{}: {} rows; token {}, log_prob {}", op, n, describe(a.token), describe(a.log_prob));
  const trace::Range range = traced(exec, Kernel::join_samples, a);
  if (n > 0) exec.kernels->join_samples(exec, a);
}

}  // namespace nrl::ops
