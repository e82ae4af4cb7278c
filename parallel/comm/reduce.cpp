#include "parallel/comm/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/base/error.h"

namespace nrl::comm {

namespace {

constexpr int64_t block = 2048;  // elements; the accumulator stays in the L1 cache

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

/// Storage and compute type of an element. 16-bit floats are loaded as their bits: loops over structs
/// do not vectorize.
template <class T>
struct Numeric {
  using Storage = T;
  using Compute = T;
  static T upcast(T x) { return x; }
  static T round(T x) { return x; }
};
template <class T>
struct Numeric16 {
  using Storage = uint16_t;
  using Compute = float;
  static float upcast(uint16_t bits) {
    T x;
    x.bits = bits;
    return static_cast<float>(x);
  }
  static uint16_t round(float x) { return T(x).bits; }
};
template <>
struct Numeric<bf16> : Numeric16<bf16> {};
template <>
struct Numeric<f16> : Numeric16<f16> {};

template <class T, class F>
void reduce_typed(void* out, std::span<const void* const> parts, int64_t count) {
  using S = typename Numeric<T>::Storage;
  using C = typename Numeric<T>::Compute;
  constexpr auto upcast = Numeric<T>::upcast;
  for (int64_t begin = 0; begin < count; begin += block) {
    const int64_t n = std::min(block, count - begin);
    const S* first = static_cast<const S*>(parts[0]) + begin;
    const S* second = static_cast<const S*>(parts[1]) + begin;
    S* to = static_cast<S*>(out) + begin;
    if (parts.size() == 2) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i)
        to[i] = Numeric<T>::round(F::template apply<C>(upcast(first[i]), upcast(second[i])));
      continue;
    }
    C acc[block];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) acc[i] = F::template apply<C>(upcast(first[i]), upcast(second[i]));
    for (size_t p = 2; p < parts.size(); ++p) {
      const S* next = static_cast<const S*>(parts[p]) + begin;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) acc[i] = F::template apply<C>(acc[i], upcast(next[i]));
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = Numeric<T>::round(acc[i]);
  }
}

template <class T>
void reduce_op(void* out, std::span<const void* const> parts, int64_t count, Reduce op) {
  switch (op) {
    case Reduce::sum:
      return reduce_typed<T, Sum>(out, parts, count);
    case Reduce::max:
      return reduce_typed<T, Max>(out, parts, count);
    case Reduce::min:
      return reduce_typed<T, Min>(out, parts, count);
  }
}

/// At least two parts.
inline void reduce_dtype(void* out, std::span<const void* const> parts, int64_t count, DType dtype,
                         Reduce op) {
  switch (dtype) {
    case DType::f32:
      return reduce_op<float>(out, parts, count, op);
    case DType::bf16:
      return reduce_op<bf16>(out, parts, count, op);
    case DType::f16:
      return reduce_op<f16>(out, parts, count, op);
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

// The same code for several instruction sets. There is nothing to fuse into a multiply-add, so all give the
// same bits.
using Reducer = void (*)(void*, std::span<const void* const>, int64_t, DType, Reduce);

[[gnu::flatten]] void reduce_baseline(void* out, std::span<const void* const> parts, int64_t count,
                                      DType dtype, Reduce op) {
  reduce_dtype(out, parts, count, dtype, op);
}

#if defined(__x86_64__)
[[gnu::target("avx2"), gnu::flatten]] void reduce_avx2(void* out, std::span<const void* const> parts,
                                                       int64_t count, DType dtype, Reduce op) {
  reduce_dtype(out, parts, count, dtype, op);
}
// bf16 is bound by its rounding, not by memory: twice the width is twice the speed.
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"), gnu::flatten]] void
reduce_avx512(void* out, std::span<const void* const> parts, int64_t count, DType dtype, Reduce op) {
  reduce_dtype(out, parts, count, dtype, op);
}
Reducer choose_reducer() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return reduce_avx512;
  return __builtin_cpu_supports("avx2") ? reduce_avx2 : reduce_baseline;
}
#else
Reducer choose_reducer() {
  return reduce_baseline;
}
#endif

}  // namespace

void reduce_into(void* out, std::span<const void* const> parts, int64_t count, DType dtype, Reduce op) {
  if (count == 0 || parts.empty()) return;
  if (parts.size() == 1) {
    if (out != parts[0]) std::memmove(out, parts[0], static_cast<size_t>(count * size_of(dtype)));
    return;
  }
  static const Reducer reducer = choose_reducer();
  reducer(out, parts, count, dtype, op);
}

void reduce_by_group(void* out, std::span<const void* const> parts, std::span<const std::vector<int>> groups,
                     int64_t count, DType dtype, Reduce op) {
  const int64_t width = size_of(dtype);
  std::vector<std::byte> memory(static_cast<size_t>(std::min(block, count) * width) * groups.size());
  std::vector<const void*> members, sums(groups.size());
  for (int64_t begin = 0; begin < count; begin += block) {
    const int64_t n = std::min(block, count - begin);
    for (size_t g = 0; g < groups.size(); ++g) {
      members.clear();
      for (const int part : groups[g])
        members.push_back(static_cast<const std::byte*>(parts[part]) + begin * width);
      std::byte* sum = memory.data() + static_cast<int64_t>(g) * n * width;
      reduce_into(sum, members, n, dtype, op);
      sums[g] = sum;
    }
    reduce_into(static_cast<std::byte*>(out) + begin * width, sums, n, dtype, op);
  }
}

}  // namespace nrl::comm
