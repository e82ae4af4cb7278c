#include <algorithm>
#include <cstring>

#include "core/ops/hash.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

Tensor bytes_of(const Tensor& t, DType as, int64_t offset) {
  const int64_t n = t.bytes() / size_of(as) - offset;
  return make_tensor(static_cast<std::byte*>(t.data) + offset * size_of(as), as, {n}, t.device);
}

/// The words of a vector that begins at any element, in one part and in three.
Outputs hashed(Exec& e, int64_t n, DType dtype, int64_t offset) {
  const Buffer values = Buffer(DType::f32, {(n + offset) * size_of(dtype) / 4 + 1}).normal("x");
  const Tensor x = bytes_of(values, dtype, offset).rows(0, n);
  Buffer whole(DType::i64, {1}), parts = Buffer(DType::i64, {1}).fill(-7);
  Exec few = few_blocks(e);
  add_hash(e, {.x = x, .out = whole, .first = 1000});
  for (const auto& [begin, end] : {std::pair{n / 2, n}, {int64_t{0}, n / 3}, {n / 3, n / 2}})
    add_hash(few, {.x = x.rows(begin, end - begin), .out = parts, .first = 1000 + begin});
  return {{"whole", whole}, {"parts", parts}};
}

int64_t bits(const Buffer& one) {
  int64_t value = 0;
  std::memcpy(&value, one.tensor().data, sizeof value);
  return value;
}

int64_t hash_of(Exec& e, const Buffer& x, int64_t first = 0) {
  Buffer out(DType::i64, {1});
  add_hash(e, {.x = x, .out = out, .first = first});
  synchronize(e);
  return bits(out);
}

/// The value follows the formula to the last bit, also for places above 2^32.
void formula(Exec& e) {
  Buffer x(DType::i32, {3});
  x.set(0, 5), x.set(1, -1), x.set(2, 7);
  expect(hash_of(e, x) == 5 + 3 * int64_t{0xffffffff} + 5 * 7, "the sum of three words");
  const int64_t far = int64_t{1} << 33;
  const auto odd = static_cast<uint64_t>(2 * far + 1);
  const uint64_t want = 5 * odd + 0xffffffff * (odd + 2) + 7 * (odd + 4);
  expect(hash_of(e, x, far) == static_cast<int64_t>(want), "the same words far behind");
  expect(hash_of(e, Buffer(DType::i32, {1000})) == 0, "zeros");
}

/// Every flipped bit and every exchanged pair of words is seen, and parts agree with the whole.
void sensitivity(Exec& e) {
  constexpr int64_t n = 4099;
  Buffer x = Buffer(DType::i32, {n}).integers("x", -1000, 1000);
  const int64_t good = hash_of(e, x);
  for (const int64_t at : {int64_t{0}, int64_t{1}, int64_t{2048}, n - 1})
    for (int bit = 0; bit < 32; ++bit) {
      const double old = x.get(at);
      x.set(at, static_cast<double>(static_cast<int32_t>(
                    static_cast<uint32_t>(old < 0 ? old + 4294967296.0 : old) ^ (uint32_t{1} << bit))));
      expect(hash_of(e, x) != good, fmt::format("bit {} of word {}", bit, at));
      x.set(at, old);
    }
  expect(hash_of(e, x) == good, "the words are back");
  for (const auto& [a, b] : {std::pair<int64_t, int64_t>{0, 1}, {0, n - 1}, {3, 2051}, {1024, 2048}}) {
    if (x.get(a) == x.get(b)) x.set(b, x.get(b) + 1);
    const int64_t before = hash_of(e, x);
    const double kept = x.get(a);
    x.set(a, x.get(b)), x.set(b, kept);
    expect(hash_of(e, x) != before, fmt::format("words {} and {} exchanged", a, b));
    x.set(b, x.get(a)), x.set(a, kept);
  }
  // A number and its negative have other bits, though they are equal.
  Buffer zero(DType::f32, {5}), negative = zero;
  negative.set(3, -0.0);
  expect(hash_of(e, zero) != hash_of(e, negative), "the sign of zero");
}

void refused(Exec& e) {
  const Buffer x(DType::f32, {4, 2}), wide(DType::f64, {4}), out(DType::i64, {1}), sum(DType::f64, {1});
  const auto is_refused = [&](const AddHash& a) {
    try {
      add_hash(e, a);
    } catch (const Error& error) {
      return error.code() == Exit::internal;
    }
    return false;
  };
  expect(is_refused({.x = x, .out = out}), "a matrix");
  expect(is_refused({.x = wide, .out = out}), "words of 8 bytes");
  expect(is_refused({.x = x.tensor().rows(0, 1), .out = sum}), "an output of another type");
}

}  // namespace

NRL_OP_CASES(hash) {
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{4097}, int64_t{100003}})
    for (const DType dtype : {DType::f32, DType::bf16, DType::u8})
      for (const int64_t offset : {0, 1})
        registry.tests.push_back({fmt::format("add_hash ({}) {} from {}", n, name_of(dtype), offset),
                                  [=](Exec& e) { return hashed(e, n, dtype, offset); }, true});
  registry.properties.push_back({"add_hash formula", formula});
  registry.properties.push_back({"add_hash sees flips and exchanges", sensitivity});
  registry.properties.push_back({"add_hash refuses", refused});
}

}  // namespace nrl::ops_test
