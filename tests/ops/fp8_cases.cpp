#include <cmath>
#include <cstring>

#include "core/ops/fp8.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

/// Encoded rows in the memory of a Buffer.
struct Encoded {
  Encoded(int64_t rows, int64_t width)
      : bytes(fp8_row_bytes(width)),
        memory(DType::i32, {rows, bytes / 4}),
        tensor(make_tensor(memory.tensor().data, DType::u8, {rows, bytes}, memory.tensor().device)) {}
  uint8_t at(int64_t row, int64_t i) const {
    const auto word = static_cast<uint32_t>(static_cast<int32_t>(memory.get((row * bytes + i) / 4)));
    return static_cast<uint8_t>(word >> (8 * (i % 4)));
  }
  /// Every byte as an element of its own, so that a wrong one is far off.
  Buffer unpacked() const {
    const int64_t rows = tensor.dim(0);
    Buffer out(DType::i32, {rows, bytes});
    for (int64_t i = 0; i < rows * bytes; ++i) out.set(i, at(i / bytes, i % bytes));
    return out;
  }
  int64_t bytes;
  Buffer memory;
  Tensor tensor;
};

/// Normal numbers, with a block of zeros, tiny and huge ones, one number that dwarfs the others, and one at
/// the limit between two scales.
Buffer values(int64_t rows, int64_t width, const std::string& name) {
  Buffer x = Buffer(DType::f32, {rows, width}).normal(name, 1e-3);
  for (int64_t i = 0; i < rows * width; ++i) {
    const int64_t block = i % width / fp8_block;
    if (block == 1) x.set(i, 0.0);
    if (block == 2) x.set(i, x.get(i) * 1e-38);
    if (block == 3) x.set(i, x.get(i) * 1e38);
    if (block == 4 && i % fp8_block == 7) x.set(i, 1e4);
    if (block == 5 && i % 2 == 0) x.set(i, 1.75 * (i % 4 == 0 ? 1 : -1));
  }
  return x;
}

Outputs round_trip(Exec& e, int64_t rows, int64_t width, DType format, bool feedback) {
  const Buffer x = values(rows, width, "x");
  Buffer error = Buffer(DType::f32, {rows, width}).normal("error", 1e-5);
  // Where the numbers are small, so are the errors of the step before.
  for (int64_t i = 0; i < error.size(); ++i)
    if (i % width / fp8_block == 1 || i % width / fp8_block == 2) error.set(i, 0.0);
  Encoded out(rows, width);
  fp8_encode(e, {.x = x, .error = feedback ? error.tensor() : Tensor{}, .out = out.tensor, .format = format});
  Buffer each = Buffer(DType::f32, {rows, width}).fill(NAN), sum = Buffer(DType::f32, {1, width}).fill(NAN);
  fp8_decode(e, {.x = out.tensor, .out = each, .format = format});
  fp8_decode(e, {.x = out.tensor, .out = sum, .format = format});
  synchronize(e);
  return {{"encoded", out.unpacked()}, {"error", error}, {"each", each}, {"sum", sum, rows}};
}

/// What was encoded and what was lost are the number, exactly, and the loss is at most half a unit.
void nothing_is_lost(Exec& e) {
  const int64_t width = 777;
  for (const DType format : {DType::e4m3, DType::e5m2}) {
    const Buffer x = Buffer(DType::f32, {2, width}).normal("x");
    Buffer error(DType::f32, {2, width}), decoded(DType::f32, {2, width});
    Encoded out(2, width);
    fp8_encode(e, {.x = x, .error = error, .out = out.tensor, .format = format});
    fp8_decode(e, {.x = out.tensor, .out = decoded, .format = format});
    synchronize(e);
    const double unit = format == DType::e4m3 ? 1.0 / 16 : 1.0 / 8;
    for (int64_t i = 0; i < x.size(); ++i) {
      expect(decoded.get(i) + error.get(i) == x.get(i), fmt::format("element {} and its error", i));
      expect(std::fabs(error.get(i)) <= unit * std::fabs(x.get(i)) + 1e-5, fmt::format("error {}", i));
    }
  }
}

/// NaN or infinity spoil their block and nothing else, and errors from before.
void non_finite(Exec& e) {
  const int64_t width = 3 * fp8_block;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Buffer x = Buffer(DType::f32, {1, width}).normal("x"), error = Buffer(DType::f32, {1, width}).fill(0.5),
           decoded(DType::f32, {1, width});
    x.set(fp8_block + 3, bad);
    Encoded out(1, width);
    fp8_encode(e, {.x = x, .error = error, .out = out.tensor});
    fp8_decode(e, {.x = out.tensor, .out = decoded});
    synchronize(e);
    for (int64_t i = 0; i < width; ++i) {
      const bool spoiled = i / fp8_block == 1;
      expect(std::isnan(decoded.get(i)) == spoiled, fmt::format("element {}", i));
      expect(std::isfinite(error.get(i)) && (!spoiled || error.get(i) == 0.5), fmt::format("error {}", i));
    }
  }
}

}  // namespace

NRL_OP_CASES(fp8) {
  for (const DType format : {DType::e4m3, DType::e5m2})
    for (const int64_t rows : {1, 3})
      for (const int64_t width : {1, 60, 128, 1000, 20000})
        for (const bool feedback : {false, true})
          registry.tests.push_back(
              {fmt::format("fp8 {} ({}, {}){}", name_of(format), rows, width, feedback ? " with errors" : ""),
               [=](Exec& e) { return round_trip(e, rows, width, format, feedback); }, true});
  registry.properties.push_back({"fp8.nothing_is_lost", nothing_is_lost});
  registry.properties.push_back({"fp8.non_finite", non_finite});
}

}  // namespace nrl::ops_test
