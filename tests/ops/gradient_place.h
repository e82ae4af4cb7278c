#pragma once
// The places that the gradient of logits can be written to, for cases of cross_entropy.h.

#include <string_view>

#include "core/tensor/tensor.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {

enum class Place : uint8_t { over_logits, apart, front_half };

inline std::string_view name_of(Place place) {
  return place == Place::over_logits ? "over the logits" : place == Place::apart ? "apart" : "front half";
}

/// The gradient of a matrix of logits: in their type over them, as a matrix of its own in `rounded`, or in
/// `rounded` in the first half of each row of the logits.
class PlacedGradient {
 public:
  PlacedGradient(Buffer& logits, Place place, DType rounded, int64_t gap)
      : place_(place), logits_(logits), apart_(rounded, {n(), v()}, gap) {}

  /// The argument `dlogits` of the op.
  Tensor dlogits() const {
    Tensor front = logits_;
    front.dtype = apart_.tensor().dtype;
    front.stride[0] *= 2;
    return place_ == Place::over_logits ? Tensor{} : place_ == Place::apart ? apart_.tensor() : front;
  }
  /// What the op has written, once it is done.
  Output output() const {
    if (place_ == Place::over_logits) return {"dlogits", logits_, v()};
    if (place_ == Place::apart) return {"dlogits", apart_, v()};
    Buffer got(apart_.tensor().dtype, {n(), v()});
    const Tensor front = dlogits();
    for (int64_t r = 0; r < n(); ++r)
      for (int64_t i = 0; i < v(); ++i) {
        const int64_t at = r * front.stride[0] + i;
        got.set(r * v() + i,
                static_cast<double>(front.dtype == DType::f16 ? static_cast<float>(front.ptr<f16>()[at])
                                                              : static_cast<float>(front.ptr<bf16>()[at])));
      }
    expect(logits_.gap_intact(), "wrote behind the rows");
    return {"dlogits", got, v()};
  }

 private:
  int64_t n() const { return logits_.tensor().dim(0); }
  int64_t v() const { return logits_.tensor().dim(1); }

  Place place_;
  Buffer& logits_;
  Buffer apart_;
};

}  // namespace nrl::ops_test
