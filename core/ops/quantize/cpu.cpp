// FP8 operands on the CPU; formulas in core/ops/quantize.h. Tiles of 128 x 128, which hold whole blocks of
// scales of both copies, are split over the threads. A tile is read once, and its codes are transposed 8 x 8
// bytes at a time.

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/quantize/update.h"
#include "core/ops/shared/cpu/activation_row.h"
#include "core/ops/shared/cpu/amax.h"
#include "core/ops/shared/cpu/normalize_row.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/element.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t side = 128;

/// Stores the scale of a block, which has the scale byte `byte`.
NRL_INLINE void store_scale(const Tensor& t, int64_t row, int64_t column, uint32_t byte) {
  auto* at = static_cast<uint8_t*>(t.scales.data) +
             scale_offset(t.scales.kind, t.scales.row_step, t.scales.column_step, row, column);
  if (t.scales.kind == Scaling::mx32) {
    *at = static_cast<uint8_t>(byte);
  } else {
    const float scale = fp8::scale_value(byte);
    std::memcpy(at, &scale, sizeof scale);
  }
}

/// Zeroes a tile of mx32 scales, of which some belong to no element.
void clear_scales(const Tensor& t, int64_t row, int64_t column) {
  if (t)
    std::memset(static_cast<char*>(t.scales.data) +
                    scale_offset(Scaling::mx32, t.scales.row_step, t.scales.column_step, row, column),
                0, static_cast<size_t>(scale_tile(Scaling::mx32).bytes));
}

/// The place of a tile: n x k values from (row, column) on. Rows from `real` on are zero. The codes begin at
/// row `to` of the copies.
struct TilePlace {
  int64_t row, to, column, n, real, k;
};
/// A tile's values and codes; rows have a stride of `side`.
struct Tile : TilePlace {
  alignas(64) float x[side * side];
  alignas(64) uint8_t codes[side * side];
};

uint32_t largest_of(const Tile& t) {
  uint32_t largest = 0;
  for (int64_t r = 0; r < t.n; ++r) largest = std::max(largest, max_magnitude(t.x + r * side, t.k));
  return largest;
}

/// `n` numbers of a row of the source from column `column` on.
template <class T, Activation kind, bool gated>
NRL_INLINE void load_row(const T* x, int64_t columns, float* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = element::activation<SimdMath, kind>(static_cast<float>(x[i])).value;
    to[i] = gated ? value * static_cast<float>(x[columns + i]) : value;
  }
}

/// Calls body.operator()<kind, gated>().
template <class Body>
void for_activation(const QuantizeSource& s, const Body& body) {
  const auto with = [&]<Activation kind>() {
    s.gated ? body.template operator()<kind, true>() : body.template operator()<kind, false>();
  };
  switch (s.activation) {
    case Activation::silu:
      return with.template operator()<Activation::silu>();
    case Activation::gelu_tanh:
      return with.template operator()<Activation::gelu_tanh>();
    case Activation::gelu_erf:
      return with.template operator()<Activation::gelu_erf>();
    case Activation::none:
      return body.template operator()<Activation::none, false>();
  }
}

/// The tile of a norm of the source.
template <class T, class W>
void load_normalized(const QuantizeSource& s, Tile& t) {
  const int64_t ld = s.x.dim(1);
  const T* from = data_of<const T>(s.x) + t.row * ld + t.column;
  const W* weight = data_of<const W>(s.norm.weight) + t.column;
  const W* bias = s.norm.bias ? data_of<const W>(s.norm.bias) + t.column : nullptr;
  const float* means = data_of<const float>(s.norm.mean);
  const float* rstds = data_of<const float>(s.norm.rstd);
  for (int64_t r = 0; r < t.real; ++r) {
    T values[side];
    normalize_row(from + r * ld, means ? means[t.row + r] : 0.0f, rstds[t.row + r], weight,
                  s.norm.weight_offset, bias, values, t.k);
    load_row<T, Activation::none, false>(values, side, t.x + r * side, t.k);
  }
}

/// Loads a tile of dgate; if gated, also the tile of dup.
template <class T, Activation kind, bool gated>
void load_gradients(const QuantizeSource& s, Tile& t, Tile* second) {
  const int64_t ld = s.x.step(0), dout_ld = s.dout.step(0), width = s.dout.dim(1);
  const T* x = data_of<const T>(s.x) + t.row * ld + t.column;
  const T* dout = data_of<const T>(s.dout) + t.row * dout_ld + t.column;
  for (int64_t r = 0; r < t.real; ++r) {
    T gate[side], up[side];
    activation_gradients<T, kind, gated>(dout + r * dout_ld, x + r * ld, x + r * ld + width, gate, up, t.k);
    load_row<T, Activation::none, false>(gate, side, t.x + r * side, t.k);
    if (gated) load_row<T, Activation::none, false>(up, side, second->x + r * side, t.k);
  }
}

/// Zeroes the padding rows.
void clear_rest(Tile& t) {
  for (int64_t r = t.real; r < t.n; ++r) std::fill_n(t.x + r * side, t.k, 0.0f);
}

/// Columns that are cut into tiles. With `dout` its width: if gated, each tile of dgate has one of dup.
int64_t columns_of_tiles(const QuantizeSource& s) {
  return s.dout ? s.dout.dim(1) : s.columns();
}

/// Allocates the tile of dup if the source is a gated gradient.
std::unique_ptr<Tile> second_tile(const QuantizeSource& s) {
  return s.dout && s.gated ? std::make_unique<Tile>() : nullptr;
}

/// Loads the tile at the place t, and the second one.
void load_tile(const QuantizeSource& s, Tile& t, Tile* second) {
  if (second) {
    static_cast<TilePlace&>(*second) = t;
    second->column += columns_of_tiles(s);
  }
  const int64_t ld = s.x.step(0), columns = s.columns();
  if (s.norm)
    return for_f32_or_bf16(s.x.dtype, [&]<class T>() {
      for_f32_or_bf16(s.norm.weight.dtype, [&]<class W>() { load_normalized<T, W>(s, t); });
    });
  for_f32_or_bf16(s.x.dtype, [&]<class T>() {
    const T* from = data_of<const T>(s.x) + t.row * ld + t.column;
    for_activation(s, [&]<Activation kind, bool gated>() {
      if (s.dout) return load_gradients<T, kind, gated>(s, t, second);
      for (int64_t r = 0; r < t.real; ++r)
        load_row<T, kind, gated>(from + r * ld, columns, t.x + r * side, t.k);
    });
  });
  clear_rest(t);
  if (second) clear_rest(*second);
}

/// Rows of the source, and where they are in the copies, with zeros up to `padded` rows.
struct RowGroup {
  int64_t row, rows, to, padded;
  int64_t tiles(int64_t across) const { return (padded + side - 1) / side * across; }
};
class RowGroups {
 public:
  RowGroups(const Tensor& offsets, int64_t rows, Scaling kind)
      : offsets_(data_of<const int32_t>(offsets)),
        count_(offsets_ ? offsets.dim(0) - 1 : 1),
        rows_(rows),
        unit_(row_unit(kind)) {}
  int64_t count() const { return count_; }
  RowGroup operator[](int64_t g) const {
    if (!offsets_) return {0, rows_, 0, rows_};
    const int64_t row = offsets_[g], rows = offsets_[g + 1] - row;
    return {row, rows, group_begin(row, g, unit_), (rows + unit_ - 1) / unit_ * unit_};
  }

 private:
  const int32_t* offsets_;
  int64_t count_, rows_, unit_;
};

/// Splits the tiles of all groups over the threads. Each calls start(tile, each), in which each(body) calls
/// body() for the tiles of the thread; the place of the tile is set then.
template <class Start>
void for_tiles(int threads, const RowGroups& groups, int64_t k, const Start& start) {
  const int64_t across = (k + side - 1) / side;
  int64_t tiles = 0;
  for (int64_t g = 0; g < groups.count(); ++g) tiles += groups[g].tiles(across);
  cpu::parallel_for(threads, tiles, 1, [&](int64_t begin, int64_t end) {
    Tile t;
    start(t, [&](const auto& body) {
      int64_t first = 0;  // tile of the group
      for (int64_t g = 0; g < groups.count() && first < end; ++g) {
        const RowGroup group = groups[g];
        const int64_t count = group.tiles(across);
        for (int64_t i = std::max<int64_t>(begin - first, 0); i < std::min(end - first, count); ++i) {
          const int64_t down = i / across * side;
          t.row = group.row + down;
          t.to = group.to + down;
          t.column = i % across * side;
          t.n = std::min(side, group.padded - down);
          t.real = std::clamp<int64_t>(group.rows - down, 0, t.n);
          t.k = std::min(side, k - t.column);
          body();
        }
        first += count;
      }
    });
  });
}

template <DType format>
NRL_INLINE void encode_group(const float* x, uint8_t* codes, int64_t n, uint32_t byte) {
  const float inverse = fp8::inverse_scale(byte);
  const uint32_t kept = byte == fp8::bad_scale ? 0 : 0xff;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(fp8::encode<format>(x[i] * inverse) & kept);
}

/// Codes with scales of `group` neighbors in a row.
template <DType format>
void encode_rows(Tile& t, const Tensor& out, int64_t group) {
  for (int64_t r = 0; r < t.n; ++r)
    for (int64_t c = 0; c < t.k; c += group) {
      const int64_t n = std::min(group, t.k - c);
      const uint32_t byte = fp8::scale_of<format>(max_magnitude(t.x + r * side + c, n));
      store_scale(out, t.to + r, t.column + c, byte);
      encode_group<format>(t.x + r * side + c, t.codes + r * side + c, n, byte);
    }
}

/// Codes with scales of `group` neighbors in a column: the rows of the transpose.
template <DType format>
void encode_columns(Tile& t, const Tensor& out, int64_t group) {
  for (int64_t first = 0; first < t.n; first += group) {
    const int64_t end = std::min(first + group, t.n);
    uint32_t largest[side] = {}, kept[side];
    float inverse[side];
    for (int64_t r = first; r < end; ++r)
#pragma omp simd
      for (int64_t c = 0; c < t.k; ++c) largest[c] = std::max(largest[c], magnitude(t.x[r * side + c]));
    for (int64_t c = 0; c < t.k; ++c) {
      const uint32_t byte = fp8::scale_of<format>(largest[c]);
      store_scale(out, t.column + c, t.to + first, byte);
      inverse[c] = fp8::inverse_scale(byte);
      kept[c] = byte == fp8::bad_scale ? 0 : 0xff;
    }
    for (int64_t r = first; r < end; ++r)
#pragma omp simd
      for (int64_t c = 0; c < t.k; ++c)
        t.codes[r * side + c] =
            static_cast<uint8_t>(fp8::encode<format>(t.x[r * side + c] * inverse[c]) & kept[c]);
  }
}

template <DType format>
void encode_tile(Tile& t, float scale) {
  const float inverse = 1.0f / scale;
  for (int64_t r = 0; r < t.n; ++r) {
    const float* x = t.x + r * side;
    uint8_t* codes = t.codes + r * side;
#pragma omp simd
    for (int64_t c = 0; c < t.k; ++c)
      codes[c] = static_cast<uint8_t>(fp8::encode_saturating<format>(x[c], inverse));
  }
}

void write_rows(const Tile& t, const Tensor& out) {
  auto* to = static_cast<uint8_t*>(out.data) + t.to * out.dim(1) + t.column;
  for (int64_t r = 0; r < t.n; ++r)
    std::memcpy(to + r * out.dim(1), t.codes + r * side, static_cast<size_t>(t.k));
}

/// a[i] byte j becomes byte i of a[j].
NRL_INLINE void transpose_8x8(uint64_t (&a)[8]) {
  constexpr uint64_t masks[] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
  for (int step = 0; step < 3; ++step) {
    const int distance = 1 << step, shift = 8 << step;
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      const uint64_t low = a[i], high = a[i + distance];
      a[i] = (low & masks[step]) | (high & masks[step]) << shift;
      a[i + distance] = (low >> shift & masks[step]) | (high & ~masks[step]);
    }
  }
}

/// `from` (n, k) becomes `to` (k, n); bytes between rows.
NRL_INLINE void transpose_tile(const uint8_t* from, int64_t from_step, int64_t n, int64_t k, uint8_t* to,
                               int64_t to_step) {
  for (int64_t c = 0; c < k; c += 8)
    for (int64_t r = 0; r < n; r += 8) {
      uint64_t a[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&a[i], from + (r + i) * from_step + c, 8);
      transpose_8x8(a);
      for (int i = 0; i < 8; ++i) std::memcpy(to + (c + i) * to_step + r, &a[i], 8);
    }
}

void write_columns(const Tile& t, const Tensor& out) {
  transpose_tile(t.codes, side, t.n, t.k, static_cast<uint8_t*>(out.data) + t.column * out.dim(1) + t.to,
                 out.dim(1));
}

template <DType format>
void quantize_tile(const Quantize& a, Tile& t, uint32_t& largest) {
  const Tensor& either = a.row ? a.row : a.column;
  const Scaling kind = either.scales.kind;
  if (kind == Scaling::row128 || kind == Scaling::mx32) {
    const int64_t group = kind == Scaling::row128 ? 128 : 32;
    if (kind == Scaling::mx32 && (t.n < side || t.k < side)) {
      clear_scales(a.row, t.to, t.column);
      clear_scales(a.column, t.column, t.to);
    }
    if (a.row) {
      encode_rows<format>(t, a.row, group);
      write_rows(t, a.row);
    }
    if (a.column) {
      encode_columns<format>(t, a.column, group);
      write_columns(t, a.column);
    }
    return;
  }
  if (kind == Scaling::block128 || either.scales.amax) largest = std::max(largest, largest_of(t));
  if (kind == Scaling::block128) {
    const uint32_t byte = fp8::scale_of<format>(largest);
    for (int64_t r = 0; r < t.n; ++r) encode_group<format>(t.x + r * side, t.codes + r * side, t.k, byte);
    if (a.row) store_scale(a.row, t.to, t.column, byte);
    if (a.column) store_scale(a.column, t.column, t.to, byte);
    largest = 0;
  } else {
    encode_tile<format>(t, *static_cast<const float*>(either.scales.data));
  }
  if (a.row) write_rows(t, a.row);
  if (a.column) write_columns(t, a.column);
}

template <DType format>
void quantize_as(Exec& exec, const Quantize& a) {
  const Scales& scales = (a.row ? a.row : a.column).scales;
  const RowGroups groups(a.offsets, a.source.x.dim(0), scales.kind);
  for_tiles(exec.threads, groups, columns_of_tiles(a.source), [&](Tile& t, const auto& each) {
    const std::unique_ptr<Tile> second = second_tile(a.source);
    uint32_t largest = 0;
    each([&] {
      load_tile(a.source, t, second.get());
      quantize_tile<format>(a, t, largest);
      if (second) quantize_tile<format>(a, *second, largest);
    });
    if (scales.amax) combine_amax(scales.amax, largest);
  });
}

void quantize_kernel(Exec& exec, const Quantize& a) {
  const Tensor& either = a.row ? a.row : a.column;
  const DType format = either.dtype;
  if (a.measured)
    *static_cast<float*>(either.scales.data) =
        fp8::tensor_scale(*data_of<const float>(a.measured), format, a.margin, 1.0f);
  for (int64_t p = 0; p < a.parts; ++p) {
    const Quantize part = part_of(a, p);
    format == DType::e4m3 ? quantize_as<DType::e4m3>(exec, part) : quantize_as<DType::e5m2>(exec, part);
  }
}

void transpose_kernel(Exec& exec, const Transpose& a) {
  const int64_t n = a.x.dim(0), k = a.x.dim(1), across = (k + side - 1) / side,
                tiles = (n + side - 1) / side * across;
  cpu::parallel_for(exec.threads, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * side, column = i % across * side;
      transpose_tile(static_cast<const uint8_t*>(a.x.data) + row * k + column, k, std::min(side, n - row),
                     std::min(side, k - column), static_cast<uint8_t*>(a.out.data) + column * n + row, n);
      if (a.x.scales.kind == Scaling::block128)
        store_scale(a.out, column, row,
                    fp8::scale_byte(fp8::scale_at(Scaling::block128, a.x.scales.data, a.x.scales.row_step,
                                                  a.x.scales.column_step, row, column)));
    }
  });
}

void largest_magnitude_kernel(Exec& exec, const LargestMagnitude& a) {
  const int64_t n = a.offsets ? data_of<const int32_t>(a.offsets)[a.offsets.dim(0) - 1] : a.source.x.dim(0);
  for_tiles(exec.threads, RowGroups({}, n, Scaling::tensor), columns_of_tiles(a.source),
            [&](Tile& t, const auto& each) {
              const std::unique_ptr<Tile> second = second_tile(a.source);
              uint32_t largest = 0;
              each([&] {
                load_tile(a.source, t, second.get());
                largest = std::max(largest, largest_of(t));
                if (second) largest = std::max(largest, largest_of(*second));
              });
              combine_amax(data_of<float>(a.amax), largest);
            });
}

/// Calls body(block, begin, count) for the parts of rows that lie in a block, all of a block on one thread;
/// `block` is its place among the scales.
template <class Body>
void for_blocks(int threads, const MatrixPart& p, const Body& body) {
  const int64_t n = p.x.dim(0), k = p.columns, end = p.first + n, across = k / side,
                per_row = scale_matrix(Scaling::block128, 1, k).bytes / 4, top = p.first / k / side;
  const int64_t down = n == 0 ? 0 : (end - 1) / k / side - top + 1;
  cpu::parallel_for(threads, down * across, 1, [&](int64_t first_block, int64_t last_block) {
    for (int64_t b = first_block; b < last_block; ++b) {
      const int64_t row0 = (top + b / across) * side, column = b % across * side;
      for (int64_t row = row0; row < row0 + side; ++row) {
        const int64_t from = std::max(p.first, row * k + column), to = std::min(end, row * k + column + side);
        if (from < to) body((top + b / across) * per_row + b % across, from - p.first, to - from);
      }
    }
  });
}

void block_magnitudes_kernel(Exec& exec, const BlockMagnitudes& a) {
  for_f32_or_bf16(a.part.x.dtype, [&]<class T>() {
    const T* x = data_of<const T>(a.part.x);
    auto* amax = data_of<uint32_t>(a.amax);
    for_blocks(exec.threads, a.part, [&](int64_t block, int64_t begin, int64_t count) {
      float values[side];
      load_row<T, Activation::none, false>(x + begin, side, values, count);
      amax[block] = std::max(amax[block], max_magnitude(values, count));
    });
  });
}

void quantize_part_kernel(Exec& exec, const QuantizePart& a) {
  for_f32_or_bf16(a.part.x.dtype, [&]<class T>() {
    const T* x = data_of<const T>(a.part.x);
    const float* scale = data_of<const float>(a.scale);
    auto* out = data_of<uint8_t>(a.out);
    for_blocks(exec.threads, a.part, [&](int64_t block, int64_t begin, int64_t count) {
      float values[side];
      load_row<T, Activation::none, false>(x + begin, side, values, count);
      const uint32_t byte = fp8::scale_byte(scale[block]);
      a.out.dtype == DType::e4m3 ? encode_group<DType::e4m3>(values, out + begin, count, byte)
                                 : encode_group<DType::e5m2>(values, out + begin, count, byte);
    });
  });
}

void update_scales_kernel(Exec&, const UpdateScales& a) {
  for (int64_t i = 0; i < a.scale.dim(0); ++i) {
    float *amax = data_of<float>(a.amax) + i, *scale = data_of<float>(a.scale) + i;
    if (a.blocks)
      fp8::update_block_scale(amax, scale, a.format);
    else
      fp8::update_scale(amax, a.amax.step(0), a.amax.dim(0), scale, a.format, a.margin, a.most_recent,
                        a.keep);
  }
}

}  // namespace

void fill_quantize(KernelTable& table) {
  table.quantize = quantize_kernel;
  table.transpose = transpose_kernel;
  table.largest_magnitude = largest_magnitude_kernel;
  table.block_magnitudes = block_magnitudes_kernel;
  table.quantize_part = quantize_part_kernel;
  table.update_scales = update_scales_kernel;
}

}  // namespace nrl::ops::NRL_ISA
