// Slices of a tensor carry the scales of their elements.

#include "core/tensor/tensor.h"

#include <vector>

#include "tests/catch.h"

namespace nrl {
namespace {

/// A matrix of 1-byte values whose scales lie in `memory`.
Tensor scaled(std::vector<char>& memory, Scaling kind, int64_t rows, int64_t columns) {
  const ScaleMatrix scales = scale_matrix(kind, rows, columns);
  memory.resize(static_cast<size_t>(rows * columns + scales.bytes));
  Tensor t = make_tensor(memory.data(), DType::e4m3, {rows, columns});
  t.scales = {.data = memory.data() + rows * columns,
              .kind = kind,
              .row_step = scales.row_step,
              .column_step = scales.column_step};
  return t;
}

int64_t moved(const Tensor& slice, const Tensor& whole) {
  return static_cast<char*>(slice.scales.data) - static_cast<char*>(whole.scales.data);
}

template <class F>
bool refused(F f, const char* word) {
  try {
    f();
  } catch (const Error& e) {
    return e.code() == Exit::internal && std::string(e.what()).find(word) != std::string::npos;
  }
  return false;
}

TEST_CASE("layouts of scales", "[tensor]") {
  REQUIRE(scale_matrix(Scaling::none, 300, 256).bytes == 0);
  REQUIRE(scale_matrix(Scaling::tensor, 300, 256).bytes == 4);
  // Column by column of blocks, the 6 rows padded to 8.
  const ScaleMatrix row = scale_matrix(Scaling::row128, 6, 300);
  REQUIRE((row.row_step == 4 && row.column_step == 32 && row.bytes == 96));
  // 3 x 2 blocks in rows padded to 4.
  const ScaleMatrix block = scale_matrix(Scaling::block128, 300, 256);
  REQUIRE((block.row_step == 16 && block.column_step == 4 && block.bytes == 48));
  const ScaleMatrix mx = scale_matrix(Scaling::mx32, 300, 256);
  REQUIRE((mx.row_step == 1024 && mx.column_step == 512 && mx.bytes == 3072));
}

TEST_CASE("slices move to the scales of their blocks", "[tensor]") {
  std::vector<char> memory;
  Tensor t = scaled(memory, Scaling::tensor, 300, 512);
  REQUIRE(moved(t.rows(7, 5), t) == 0);
  REQUIRE(moved(t.columns(7, 5), t) == 0);
  t = scaled(memory, Scaling::row128, 300, 512);
  REQUIRE(moved(t.rows(7, 5), t) == 7 * 4);
  REQUIRE(moved(t.columns(128, 256), t) == 300 * 4);
  REQUIRE(moved(t.columns(256, 256).rows(299, 1), t) == (2 * 300 + 299) * 4);
  t = scaled(memory, Scaling::block128, 300, 512);
  REQUIRE(moved(t.rows(128, 172), t) == 16);  // up to the end, which cuts nothing
  REQUIRE(moved(t.columns(384, 128), t) == 12);
  t = scaled(memory, Scaling::mx32, 300, 512);
  REQUIRE(moved(t.rows(256, 44), t) == 2 * 4 * 512);
  REQUIRE(moved(t.columns(128, 128), t) == 512);
  // Sizes without memory, as a plan has them.
  t.scales.data = nullptr;
  REQUIRE(t.rows(128, 128).scales.data == nullptr);
  REQUIRE(t.rows(128, 128).scales.kind == Scaling::mx32);
}

TEST_CASE("cuts through a block of scales are refused", "[tensor]") {
  std::vector<char> memory;
  for (const Scaling kind : {Scaling::row128, Scaling::block128, Scaling::mx32}) {
    CAPTURE(name_of(kind));
    const Tensor t = scaled(memory, kind, 300, 512);
    REQUIRE(refused([&] { t.columns(64, 64); }, "would cut a block"));
    REQUIRE(refused([&] { t.columns(0, 100); }, "multiples of 128"));
    REQUIRE(refused([&] { t.split_heads(8, 64); }, "heads of 64"));
    if (kind != Scaling::row128) {
      REQUIRE(refused([&] { t.rows(1, 299); }, "would cut a block"));
      REQUIRE(refused([&] { t.rows(0, 1); }, std::string(name_of(kind)).c_str()));
    }
    const Tensor heads = t.split_heads(4, 128);
    REQUIRE(moved(heads.rows(128, 128), t) == moved(t.rows(128, 128), t));
    REQUIRE(refused([&] { heads.columns(0, 64); }, "belong to a matrix"));
    Tensor flat = make_tensor(memory.data(), DType::e4m3, {1024});
    flat.scales.kind = kind;
    REQUIRE(refused([&] { flat.rows(0, 512); }, "belong to a matrix"));
  }
}

TEST_CASE("a slice of rows may leave its scales apart", "[tensor]") {
  std::vector<char> memory;
  const Tensor t = scaled(memory, Scaling::row128, 300, 512);
  REQUIRE(t.dense_scales());
  REQUIRE(t.columns(128, 128).dense_scales());
  REQUIRE_FALSE(t.rows(0, 100).dense_scales());
  REQUIRE(scaled(memory, Scaling::mx32, 300, 512).rows(128, 128).dense_scales());
  REQUIRE_FALSE(scaled(memory, Scaling::mx32, 300, 512).columns(0, 128).dense_scales());
  REQUIRE(describe(t) == "e4m3[300, 512] with row128 scales");
}

}  // namespace
}  // namespace nrl
