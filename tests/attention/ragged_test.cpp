// The small kernels around a library of attention, on the simulated device.

#include "core/ops/attention/cudnn/ragged.h"

#include <cmath>
#include <vector>

#include "core/ops/attention.h"
#include "tests/catch.h"

namespace nrl::ops {
namespace {

TEST_CASE("Sequences of unequal length are described with empty ones behind them") {
  const std::vector<int32_t> cu = {0, 5, 5, 12};
  attention::RowSteps steps;
  steps.count = 2;
  steps.step[0] = 3;
  steps.step[1] = int64_t{1} << 33;
  const int64_t room = 300;  // more than one block
  std::vector<int32_t> lengths(room, -1);
  std::vector<int64_t> offsets(2 * (room + 1), -1);
  sim::ragged_description(nullptr, cu.data(), 3, room, steps, lengths.data(), offsets.data());
  const std::vector<int64_t> begins = {0, 5, 5, 12};
  for (int64_t s = 0; s <= room; ++s) {
    const int64_t begin = begins[s < 3 ? s : 3];
    if (s < room) CHECK(lengths[s] == (s == 0 ? 5 : s == 2 ? 7 : 0));
    CHECK(offsets[s] == 3 * begin);
    CHECK(offsets[room + 1 + s] == begin << 33);
  }
}

TEST_CASE("Scales of FP8 factors follow from those of the operands") {
  using namespace attention;
  const float dout = 1e-5f, v = 3e-3f;
  std::vector<float> n(fp8_numbers, -1.0f);
  sim::write_fp8_numbers(nullptr, 0.125f, 64, &dout, &v, n.data());
  CHECK(n[one] == 1.0f);
  CHECK(n[p_scale] * n[p_code_scale] == 1.0f);
  CHECK(n[p_code_scale] == 256.0f);
  CHECK(n[ds_scale] == score_gradient_scale(0.125f, 64, dout, v));
  CHECK(n[ds_code_scale] == 1.0f / n[ds_scale]);
  CHECK(n[first_amax] == -1.0f);
  sim::write_fp8_numbers(nullptr, 0.125f, 64, nullptr, &v, n.data());  // of a forward pass
  CHECK(n[p_code_scale] == 256.0f);
}

TEST_CASE("Statistics are transposed between row steps") {
  const int64_t rows = 70, columns = 37, from_step = 40, to_step = 75;
  std::vector<float> from(rows * from_step), to(columns * to_step, -1.0f);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  sim::transpose_f32(nullptr, from.data(), from_step, rows, columns, to.data(), to_step);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < to_step; ++r)
      REQUIRE(to[c * to_step + r] == (r < rows ? from[r * from_step + c] : -1.0f));
}

struct Blocks {
  int64_t sequences, rows;  ///< rows: of all sequences
  RowBlocks blocks;
  /// Of a row of the tensor; -1: of none.
  int64_t sequence_of(int64_t row) const {
    for (int64_t s = 0; s < sequences; ++s)
      if (row >= begin(s) && row < begin(s) + blocks.rows) return s;
    return -1;
  }
  int64_t begin(int64_t s) const { return blocks.first + s * blocks.step; }
};
const Blocks block_cases[] = {
    {4, 6000, {0, 1500, 1500}},   // all rows; more than one thread block a head, the last one short
    {3, 4200, {700, 700, 1400}},  // the second half of each sequence
    {3, 4200, {0, 700, 1400}},    // the first
    {1, 1300, {600, 700, 0}},     // of one sequence
    {2, 50, {3, 10, 20}}};

TEST_CASE("Statistics of sequences of one length are packed by sequence, and back") {
  const int64_t heads = 3;
  for (const Blocks& b : block_cases) {
    CAPTURE(b.sequences, b.rows);
    const int64_t row_step = b.rows + 5, length = b.blocks.rows;
    std::vector<float> ours(static_cast<size_t>(heads * row_step), -1.0f),
        packed(static_cast<size_t>(heads * b.sequences * length), -2.0f);
    float next = 0;
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < b.rows; ++i) ours[head * row_step + i] = next++;
    sim::pack_statistics(nullptr, ours.data(), row_step, b.rows, heads, b.sequences, b.blocks, packed.data());
    for (int64_t s = 0; s < b.sequences; ++s)
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t i = 0; i < length; ++i)
          REQUIRE(packed[(s * heads + head) * length + i] == ours[head * row_step + b.begin(s) + i]);
    std::vector<float> want = ours, back(ours.size(), -1.0f);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < b.rows; ++i)
        if (b.sequence_of(i) < 0) want[head * row_step + i] = -INFINITY;
    sim::unpack_statistics(nullptr, packed.data(), heads, b.sequences, b.blocks, back.data(), row_step,
                           b.rows);
    CHECK(back == want);  // and nothing between the heads is written
  }
}

TEST_CASE("Rows of no sequence are cleared") {
  const int64_t width = 24, step = 32;
  for (const Blocks& b : block_cases) {
    CAPTURE(b.sequences, b.rows);
    std::vector<bf16> memory(static_cast<size_t>(b.rows * step + 8));
    for (bf16& v : memory) v.bits = 7;
    bf16* const x =
        memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16 / sizeof(bf16);
    sim::clear_other_rows_bf16(nullptr, x, b.rows, width, step, b.sequences, b.blocks, 4);
    for (int64_t row = 0; row < b.rows; ++row)
      for (int64_t i = 0; i < (row + 1 < b.rows ? step : width); ++i)
        REQUIRE(x[row * step + i].bits == (b.sequence_of(row) < 0 && i < width ? 0 : 7));
  }
}

TEST_CASE("Dense rows are spread over a wider buffer") {
  const int64_t rows = 9, width = 24, to_step = 64;
  std::vector<bf16> from(rows * width + 8), to(rows * to_step + 8);
  auto aligned = [](std::vector<bf16>& v) {
    return v.data() + (16 - reinterpret_cast<uintptr_t>(v.data()) % 16) % 16 / sizeof(bf16);
  };
  bf16 *source = aligned(from), *target = aligned(to);
  for (int64_t i = 0; i < rows * width; ++i) source[i].bits = static_cast<uint16_t>(i + 1);
  sim::spread_rows_bf16(nullptr, source, rows, width, target, to_step, 4);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < (r + 1 < rows ? to_step : width); ++c)
      REQUIRE(target[r * to_step + c].bits == (c < width ? r * width + c + 1 : 0));
}

}  // namespace
}  // namespace nrl::ops
