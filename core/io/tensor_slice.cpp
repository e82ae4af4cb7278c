#include "core/io/tensor_slice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/base/error.h"

namespace nrl {
namespace {

struct Strides {
  int64_t row, column;
};

// Calls visit(i, j) for all of (rows, columns) in tiles, so that both sides of a transpose stay in the cache.
template <class Visit>
void for_each_in_tiles(int64_t rows, int64_t columns, const Visit& visit) {
  constexpr int64_t tile = 32;
  for (int64_t i0 = 0; i0 < rows; i0 += tile)
    for (int64_t j0 = 0; j0 < columns; j0 += tile)
      for (int64_t i = i0; i < std::min(rows, i0 + tile); ++i)
        for (int64_t j = j0; j < std::min(columns, j0 + tile); ++j) visit(i, j);
}

template <class T>
void copy_elements(const char* in, Strides from, char* out, Strides to, int64_t rows, int64_t columns) {
  const T* source = reinterpret_cast<const T*>(in);
  T* target = reinterpret_cast<T*>(out);
  for_each_in_tiles(rows, columns, [&](int64_t i, int64_t j) {
    target[i * to.row + j * to.column] = source[i * from.row + j * from.column];
  });
}

// Elements of `unit` bytes, `rows` by `columns` of them.
void copy_strided(int64_t unit, const char* in, Strides from, char* out, Strides to, int64_t rows,
                  int64_t columns) {
  if (from.column == 1 && to.column == 1) {
    const bool gapless = from.row == columns && to.row == columns;
    const int64_t runs = gapless ? 1 : rows, run = gapless ? rows * columns : columns;
    for (int64_t i = 0; i < runs; ++i)
      std::memcpy(out + i * to.row * unit, in + i * from.row * unit, static_cast<size_t>(run * unit));
    return;
  }
  switch (unit) {
    case 1:
      return copy_elements<uint8_t>(in, from, out, to, rows, columns);
    case 2:
      return copy_elements<uint16_t>(in, from, out, to, rows, columns);
    case 4:
      return copy_elements<uint32_t>(in, from, out, to, rows, columns);
    case 8:
      return copy_elements<uint64_t>(in, from, out, to, rows, columns);
    default:
      NRL_CHECK(false, "elements of {} bytes", unit);
  }
}

float value_of(DType dtype, const char* raw, int64_t i) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(raw)[i];
  if (dtype == DType::bf16) return static_cast<float>(reinterpret_cast<const bf16*>(raw)[i]);
  return static_cast<float>(reinterpret_cast<const f16*>(raw)[i]);
}

// Converts `count` contiguous elements to the type `to`.
void convert(DType from, const char* in, DType to, char* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = value_of(from, in, i);
    if (to == DType::f32)
      reinterpret_cast<float*>(out)[i] = value;
    else if (to == DType::bf16)
      reinterpret_cast<bf16*>(out)[i] = bf16(value);
    else
      reinterpret_cast<f16*>(out)[i] = f16(value);
  }
}

}  // namespace

int64_t slice_block_rows(int64_t row_bytes) {
  return std::max<int64_t>(1, slice_block_bytes / row_bytes);
}

void copy_rows(const TensorSlice& s, int64_t row, int64_t rows, void* out, int64_t stride) {
  NRL_CHECK(row >= s.row && rows >= 0 && row + rows <= s.row + s.rows, "rows {}+{} of a slice {}+{} of {}",
            row, rows, s.row, s.rows, s.name);
  const Strides from = s.transposed ? Strides{1, s.rows} : Strides{s.columns, 1};
  const int64_t unit = size_of(s.dtype);
  copy_strided(unit, static_cast<const char*>(s.data) + (row - s.row) * from.row * unit, from,
               static_cast<char*>(out), {stride, 1}, rows, s.columns);
}

void read_slice(const TensorSlice& s, DType stored,
                const std::function<void(int64_t offset, int64_t count, void* out)>& read) {
  const int64_t width = s.width(), unit = size_of(s.dtype), stored_unit = size_of(stored);
  NRL_CHECK(s.row >= 0 && s.column >= 0 && s.row + s.rows <= s.shape.at(0) && s.column + s.columns <= width,
            "rows {}+{}, columns {}+{} of {}", s.row, s.rows, s.column, s.columns, s.name);
  // Rows [row, row + rows) of the slice.
  const auto read_rows = [&](int64_t row, int64_t rows, char* out) {
    const int64_t first = (s.row + row) * width + s.column;
    if (s.columns == width) return read(first, rows * width, out);
    for (int64_t i = 0; i < rows; ++i) read(first + i * width, s.columns, out + i * s.columns * stored_unit);
  };
  char* const data = static_cast<char*>(s.data);
  if (stored == s.dtype && !s.transposed) return read_rows(0, s.rows, data);
  const auto is_float = [](DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; };
  NRL_CHECK(stored == s.dtype || (is_float(stored) && is_float(s.dtype)), "{} cannot be read as {}",
            name_of(stored), name_of(s.dtype));
  const int64_t block = std::min(s.rows, slice_block_rows(s.columns * std::max(unit, stored_unit)));
  std::vector<char> raw(static_cast<size_t>(block * s.columns * stored_unit));
  std::vector<char> converted(stored == s.dtype ? 0 : static_cast<size_t>(block * s.columns * unit));
  const Strides to = s.transposed ? Strides{1, s.rows} : Strides{s.columns, 1};
  for (int64_t row = 0; row < s.rows; row += block) {
    const int64_t rows = std::min(block, s.rows - row);
    read_rows(row, rows, raw.data());
    if (stored != s.dtype) convert(stored, raw.data(), s.dtype, converted.data(), rows * s.columns);
    copy_strided(unit, stored == s.dtype ? raw.data() : converted.data(), {s.columns, 1},
                 data + row * to.row * unit, to, rows, s.columns);
  }
}

}  // namespace nrl
