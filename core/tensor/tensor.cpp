#include "core/tensor/tensor.h"

namespace nrl {
namespace {

/// The first tile of [begin, begin + count) of `size` rows or columns, of which a tile has `tile`.
int64_t first_tile(const Tensor& t, const char* what, int64_t begin, int64_t count, int64_t size,
                   int64_t tile) {
  NRL_CHECK(begin % tile == 0 && (count % tile == 0 || begin + count == size),
            "{} {}+{} of {} would cut a block: they must begin and end at multiples of {}", what, begin,
            count, describe(t), tile);
  return begin / tile;
}

Scales shifted(Scales s, int64_t bytes) {
  if (s.data) s.data = static_cast<char*>(s.data) + bytes;
  return s;
}

}  // namespace

Scales Tensor::scales_of_rows(int64_t begin, int64_t count) const {
  NRL_CHECK(rank >= 2, "rows of {}, which belong to a matrix", describe(*this));
  const int64_t tile = first_tile(*this, "rows", begin, count, shape[0], scale_tile(scales.kind).rows);
  return shifted(scales, tile * scales.row_step);
}

Scales Tensor::scales_of_columns(int64_t begin, int64_t count) const {
  NRL_CHECK(rank == 2, "columns of {}, which belong to a matrix", describe(*this));
  const int64_t tile = first_tile(*this, "columns", begin, count, shape[1], scale_tile(scales.kind).columns);
  return shifted(scales, tile * scales.column_step);
}

void Tensor::check_scales_of_heads(int64_t d) const {
  const int64_t tile = scale_tile(scales.kind).columns;
  NRL_CHECK(d % tile == 0, "heads of {} elements of {} would cut a block: they must be multiples of {}", d,
            describe(*this), tile);
}

bool Tensor::dense_scales() const {
  if (!has_scale_blocks(scales.kind)) return true;
  if (rank != 2) return false;
  const ScaleMatrix wanted = scale_matrix(scales.kind, shape[0], shape[1]);
  return scales.row_step == wanted.row_step && scales.column_step == wanted.column_step;
}

std::string describe(const Tensor& t) {
  std::string out(name_of(t.dtype));
  out += "[";
  for (int i = 0; i < t.rank; ++i) out += (i ? ", " : "") + std::to_string(t.dim(i));
  out += "]";
  if (t.scales.kind != Scaling::none) out += fmt::format(" with {} scales", name_of(t.scales.kind));
  return out;
}

}  // namespace nrl
