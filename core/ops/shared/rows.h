#pragma once
// Addresses of the rows of strided tensors, for CPU and GPU kernels.

#include <cstdint>

#include "core/base/host_device.h"
#include "core/tensor/tensor.h"

namespace nrl::ops {

/// Division by a number known at launch, without the long instruction sequence of an integer division
/// (Granlund & Montgomery 1994, round-up method for 31-bit numerators).
class Divider {
 public:
  Divider() : Divider(1) {}
  /// `divisor` >= 1.
  explicit Divider(int64_t divisor) : divisor_(divisor) {
    while (shift_ < 31 && (int64_t{1} << shift_) < divisor) ++shift_;
    const int64_t power = int64_t{1} << shift_;
    // A divisor beyond 2^31 is above every 31-bit numerator: multiplier 0 gives the quotient 0.
    if (divisor <= power) multiplier_ = static_cast<unsigned>((((power - divisor) << 32) / divisor) + 1);
  }
  NRL_HOST_DEVICE int64_t quotient(int64_t n) const {
    return n >> 31 ? n / divisor_ : short_quotient(static_cast<unsigned>(n));
  }
  /// The same of n < 2^31.
  NRL_HOST_DEVICE unsigned short_quotient(unsigned n) const {
    return (static_cast<unsigned>((uint64_t{n} * multiplier_) >> 32) + n) >> shift_;
  }
  NRL_HOST_DEVICE int64_t divisor() const { return divisor_; }

 private:
  int64_t divisor_;
  unsigned multiplier_ = 0, shift_ = 0;
};

/// The rows of a tensor of rank 1 to 3 whose leading dimensions may be strided; row r of (N, heads, D) is
/// head r % heads of token r / heads. Where the tensor is absent, `data` is null and rows must not be used.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t outer_stride = 0, inner_stride = 0;  ///< elements
  Divider inner;

  Rows() = default;
  explicit Rows(const Tensor& t) : data(static_cast<T*>(t.data)) {
    if (t.rank >= 2) outer_stride = t.stride[0];
    if (t.rank == 3) {
      inner = Divider(t.shape[1]);
      inner_stride = t.stride[1];
    }
  }
  /// Row `row`, an int64_t or, with fewer instructions, an int.
  template <class Int>
  NRL_HOST_DEVICE T* operator[](Int row) const {
    if (inner.divisor() == 1) return data + row * outer_stride;
    int64_t outer;
    if constexpr (sizeof(Int) == sizeof(int)) {
      outer = inner.short_quotient(static_cast<unsigned>(row));
    } else {
      outer = inner.quotient(row);
    }
    return data + outer * outer_stride + (row - outer * inner.divisor()) * inner_stride;
  }
};

}  // namespace nrl::ops
