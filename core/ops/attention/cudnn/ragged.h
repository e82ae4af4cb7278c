#pragma once
// Small kernels around cuDNN attention: offsets and lengths of ragged sequences, and statistics and gradients
// in the layouts that cuDNN reads and writes, and scales. Launchers, defined in ragged.cuh.

#include <cstdint>

#include "core/base/dtype.h"
#include "core/ops/attention.h"

namespace nrl::ops::attention {

/// Steps between rows of the tensors that need offsets.
inline constexpr int most_row_steps = 8;
struct RowSteps {
  int64_t step[most_row_steps] = {};
  int count = 0;
};

/// Numbers on the device that FP8 attention needs in addition to tensors and their scales: the scales of
/// probabilities and of score gradients, their inverses ("code scale"), 1, and unused amax outputs.
enum Fp8Number : int {
  one,
  p_scale,
  p_code_scale,
  ds_scale,
  ds_code_scale,
  first_amax,
  fp8_numbers = first_amax + 4
};

}  // namespace nrl::ops::attention

namespace nrl::ops::NRL_GPU {

/// Writes `numbers` up to first_amax. `dout_scale` and `v_scale` are on the device; a forward pass has no
/// dout_scale (null) and needs no scale of ds.
void write_fp8_numbers(void* stream, float scale, int64_t d, const float* dout_scale, const float* v_scale,
                       float* numbers);

/// From the boundaries `cu` (sequences + 1) on the device, for `room` >= sequences sequences, the last ones
/// empty: lengths[s] in rows, (room) i32, and for each of `steps` the first element of each sequence and of
/// what follows the last one, (steps.count, room + 1) i64.
void ragged_description(void* stream, const int32_t* cu, int64_t sequences, int64_t room,
                        const attention::RowSteps& steps, int32_t* lengths, int64_t* offsets);

/// to[c, r] = from[r, c] for r < rows, c < columns; `from_step` and `to_step` are elements between rows.
void transpose_f32(void* stream, const float* from, int64_t from_step, int64_t rows, int64_t columns,
                   float* to, int64_t to_step);

/// Statistics of `sequences` sequences whose rows are `blocks`: ours are (heads, rows) with `row_step`
/// elements between heads, cuDNN's are (sequences, heads, blocks.rows), packed. Rows of ours in no block are
/// not read and become minus infinity.
void pack_statistics(void* stream, const float* ours, int64_t row_step, int64_t rows, int64_t heads,
                     int64_t sequences, const RowBlocks& blocks, float* packed);
void unpack_statistics(void* stream, const float* packed, int64_t heads, int64_t sequences,
                       const RowBlocks& blocks, float* ours, int64_t row_step, int64_t rows);

/// Zeroes those rows of x that are in none of the `blocks`. The `rows` rows have `width` elements, a multiple
/// of 8, are `step` apart and aligned to 16 bytes.
void clear_other_rows_bf16(void* stream, bf16* x, int64_t rows, int64_t width, int64_t step,
                           int64_t sequences, const RowBlocks& blocks, int multiprocessors);

/// Copies `rows` rows of `width` elements, a multiple of 8, dense in `from` and `to_step` apart in `to`; both
/// must be aligned to 16 bytes.
void spread_rows_bf16(void* stream, const bf16* from, int64_t rows, int64_t width, bf16* to, int64_t to_step,
                      int multiprocessors);

}  // namespace nrl::ops::NRL_GPU
