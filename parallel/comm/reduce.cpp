#include "parallel/comm/reduce.h"

#include "core/base/error.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace nrl::comm {

namespace {

constexpr int64_t kBlock = 2048;  // elements; the accumulator stays in the first-level cache

template <class T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return x != x;
  } else {
    return false;
  }
}

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {  // wraps around instead of overflowing
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return b > a || is_nan(b) ? b : a;
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return b < a || is_nan(b) ? b : a;
  }
};

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

inline float widen(bf16 x) {
  return static_cast<float>(x);
}
template <class T>
T widen(T x) {
  return x;
}

template <class T, class F>
void reduce_typed(T* out, std::span<const void* const> parts, int64_t count) {
  using W = Wide<T>;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(parts[0]) + begin;
    const T* second = static_cast<const T*>(parts[1]) + begin;
    T* to = out + begin;
    if (parts.size() == 2) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i] = T(F::template apply<W>(widen(first[i]), widen(second[i])));
      continue;
    }
    W acc[kBlock];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) acc[i] = F::template apply<W>(widen(first[i]), widen(second[i]));
    for (size_t p = 2; p < parts.size(); ++p) {
      const T* next = static_cast<const T*>(parts[p]) + begin;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) acc[i] = F::template apply<W>(acc[i], widen(next[i]));
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = T(acc[i]);
  }
}

template <class T>
void reduce_op(void* out, std::span<const void* const> parts, int64_t count, Reduce op) {
  T* to = static_cast<T*>(out);
  switch (op) {
    case Reduce::sum:
      return reduce_typed<T, Sum>(to, parts, count);
    case Reduce::max:
      return reduce_typed<T, Max>(to, parts, count);
    case Reduce::min:
      return reduce_typed<T, Min>(to, parts, count);
  }
}

}  // namespace

void reduce_into(void* out, std::span<const void* const> parts, int64_t count, DType dtype, Reduce op) {
  if (count == 0 || parts.empty()) return;
  if (parts.size() == 1) {
    if (out != parts[0]) std::memmove(out, parts[0], static_cast<size_t>(count * size_of(dtype)));
    return;
  }
  switch (dtype) {
    case DType::f32:
      return reduce_op<float>(out, parts, count, op);
    case DType::bf16:
      return reduce_op<bf16>(out, parts, count, op);
    case DType::f64:
      return reduce_op<double>(out, parts, count, op);
    case DType::i32:
      return reduce_op<int32_t>(out, parts, count, op);
    case DType::i64:
      return reduce_op<int64_t>(out, parts, count, op);
    case DType::u8:
      return reduce_op<uint8_t>(out, parts, count, op);
    default:
      NRL_CHECK(false, "cannot reduce {}", name_of(dtype));
  }
}

}  // namespace nrl::comm
