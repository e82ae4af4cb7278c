// The small kernels around a library of attention, on the simulated device.

#include "core/ops/attention/cudnn/ragged.h"

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
    const int64_t begin = begins[static_cast<size_t>(s < 3 ? s : 3)];
    if (s < room) CHECK(lengths[static_cast<size_t>(s)] == (s == 0 ? 5 : s == 2 ? 7 : 0));
    CHECK(offsets[static_cast<size_t>(s)] == 3 * begin);
    CHECK(offsets[static_cast<size_t>(room + 1 + s)] == begin << 33);
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
      REQUIRE(to[static_cast<size_t>(c * to_step + r)] ==
              (r < rows ? from[static_cast<size_t>(r * from_step + c)] : -1.0f));
}

TEST_CASE("Statistics of equal sequences are packed by sequence, and back") {
  const int64_t heads = 3, sequences = 4, length = 1500;  // more than one block a row, the last one short
  const int64_t row_step = sequences * length + 5;
  const auto at = [&](int64_t head, int64_t s, int64_t i) {
    return static_cast<size_t>(head * row_step + s * length + i);
  };
  std::vector<float> ours(static_cast<size_t>(heads * row_step), -1.0f),
      packed(static_cast<size_t>(heads * sequences * length), -2.0f), back = ours;
  float next = 0;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t i = 0; i < sequences * length; ++i) ours[at(head, 0, i)] = next++;
  sim::pack_statistics(nullptr, ours.data(), row_step, heads, sequences, length, packed.data());
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < length; ++i)
        REQUIRE(packed[static_cast<size_t>((s * heads + head) * length + i)] == ours[at(head, s, i)]);
  sim::unpack_statistics(nullptr, packed.data(), heads, sequences, length, back.data(), row_step);
  CHECK(back == ours);  // and nothing between the heads is written
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
