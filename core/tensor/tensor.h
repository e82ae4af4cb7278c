#pragma once
// Tensor: a non-owning, trivially copyable view of device or host memory.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/scaling.h"

namespace nrl {

enum class DeviceType : uint8_t { cpu, cuda };

/// Where memory lives: the kind and, for CUDA, the ordinal.
struct Device {
  DeviceType type = DeviceType::cpu;
  int8_t index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int max_tensor_rank = 4;

/// The scales of a tensor. Scales in blocks belong to a matrix; `row_step` and `column_step` are the bytes
/// between tiles of scales below and beside each other (scale_matrix()), which slices keep.
struct Scales {
  void* data = nullptr;   ///< in the memory of the tensor; type by `kind`
  float* amax = nullptr;  ///< optional: largest |value|, which the op that writes the tensor combines in
  Scaling kind = Scaling::none;
  int64_t row_step = 0, column_step = 0;
};

/// A view: pointer, element type, shape and strides (in elements, row-major unless stated otherwise). Owns
/// nothing; the memory belongs to an arena (memory/) and must outlive the view. An empty tensor (data ==
/// nullptr) means that an optional argument of an op is absent.
///
/// A slice of a tensor with scales has the scales of its elements; one that would cut a tile of scales
/// (scale_tile()) is refused.
struct Tensor {
  void* data = nullptr;
  Scales scales{};
  std::array<int64_t, max_tensor_rank> shape{};
  std::array<int64_t, max_tensor_rank> stride{};
  int8_t rank = 0;
  DType dtype = DType::f32;
  Device device{};

  explicit operator bool() const { return data != nullptr; }
  int64_t dim(int i) const { return shape[i < 0 ? rank + i : i]; }
  int64_t step(int i) const { return stride[i < 0 ? rank + i : i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  int64_t bytes() const { return numel() * size_of(dtype); }
  /// True when the elements are dense in row-major order.
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      const auto u = static_cast<size_t>(i);
      if (shape[u] != 1 && stride[u] != expected) return false;
      expected *= shape[u];
    }
    return true;
  }

  /// The data as elements of T; the element type is checked.
  template <class T>
  T* ptr() const {
    NRL_CHECK(dtype == dtype_of<std::remove_const_t<T>>::value, "tensor is {}", name_of(dtype));
    return static_cast<T*>(data);
  }

  /// Rows [begin, begin + count) of the first dimension.
  Tensor rows(int64_t begin, int64_t count) const {
    NRL_CHECK(rank > 0 && begin >= 0 && count >= 0 && begin + count <= shape[0], "rows {}+{} of {}", begin,
              count, shape[0]);
    Tensor t = *this;
    t.data = static_cast<char*>(data) + begin * stride[0] * size_of(dtype);
    t.shape[0] = count;
    if (has_scale_blocks(scales.kind)) t.scales = scales_of_rows(begin, count);
    return t;
  }
  /// Columns [begin, begin + count) of the last dimension.
  Tensor columns(int64_t begin, int64_t count) const {
    const auto last = static_cast<size_t>(rank - 1);
    NRL_CHECK(rank > 0 && begin >= 0 && count >= 0 && begin + count <= shape[last]);
    Tensor t = *this;
    t.data = static_cast<char*>(data) + begin * stride[last] * size_of(dtype);
    t.shape[last] = count;
    if (has_scale_blocks(scales.kind)) t.scales = scales_of_columns(begin, count);
    return t;
  }
  /// (N, heads * d) -> (N, heads, d). Rows keep their stride, so column slices of wider matrices work too.
  Tensor split_heads(int64_t heads, int64_t d) const {
    NRL_CHECK(rank == 2 && shape[1] == heads * d && stride[1] == 1);
    if (has_scale_blocks(scales.kind)) check_scales_of_heads(d);
    Tensor t = *this;
    t.rank = 3;
    t.shape = {shape[0], heads, d};
    t.stride = {stride[0], d, 1};
    return t;
  }

  /// True when the scales lie as scale_matrix() says for this shape, which a slice's need not.
  bool dense_scales() const;

 private:
  Scales scales_of_rows(int64_t begin, int64_t count) const;
  Scales scales_of_columns(int64_t begin, int64_t count) const;
  void check_scales_of_heads(int64_t d) const;
};
static_assert(std::is_trivially_copyable_v<Tensor>);

/// A contiguous row-major view of `data`.
inline Tensor make_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
  NRL_CHECK(shape.size() <= max_tensor_rank);
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  t.rank = static_cast<int8_t>(shape.size());
  size_t i = 0;
  for (int64_t n : shape) t.shape[i++] = n;
  int64_t step = 1;
  for (size_t j = shape.size(); j-- > 0;) {
    t.stride[j] = step;
    step *= t.shape[j];
  }
  return t;
}

/// "f32[4, 128]" or "e4m3[4, 128] with row128 scales" for messages.
std::string describe(const Tensor& t);

}  // namespace nrl
