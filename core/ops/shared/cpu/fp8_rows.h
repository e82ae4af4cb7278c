#pragma once
// FP8 operands as f32 for the CPU's GEMMs.

#include <algorithm>

#include "core/device/cpu/parallel.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_ISA {

template <DType format>
NRL_INLINE void decode_group(const uint8_t* codes, float scale, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = fp8::decode_any<format>(codes[i]) * scale;
}

/// out (rows, columns), dense = the numbers of `t`, a matrix in FP8 with scales of any kind.
template <DType format>
void decode_rows_as(int threads, const Tensor& t, float* out) {
  const int64_t columns = t.dim(1);
  const Scales& s = t.scales;
  const int64_t group = s.kind == Scaling::tensor ? columns : s.kind == Scaling::mx32 ? 32 : 128;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(columns, 1));
  cpu::parallel_for(threads, t.dim(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* codes = data_of<const uint8_t>(t) + r * t.step(0);
      for (int64_t c = 0; c < columns; c += group)
        decode_group<format>(codes + c, fp8::scale_at(s.kind, s.data, s.row_step, s.column_step, r, c),
                             out + r * columns + c, std::min(group, columns - c));
    }
  });
}

inline void decode_rows(int threads, const Tensor& t, float* out) {
  t.dtype == DType::e4m3 ? decode_rows_as<DType::e4m3>(threads, t, out)
                         : decode_rows_as<DType::e5m2>(threads, t, out);
}

}  // namespace nrl::ops::NRL_ISA
