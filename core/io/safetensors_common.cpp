#include "core/io/safetensors_common.h"

#include "core/base/error.h"
#include "core/io/safetensors.h"

namespace nrl {
namespace detail {
namespace {

// In the format's own order.
constexpr SafetensorsDType types[] = {
    {"BOOL", 8, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"U8", 8, DType::u8},
    {"I8", 8, {}},
    {"F8_E5M2", 8, DType::e5m2},
    {"F8_E4M3", 8, DType::e4m3},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, DType::u16},
    {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},
    {"I32", 32, DType::i32},
    {"U32", 32, {}},
    {"F32", 32, DType::f32},
    {"C64", 64, {}},
    {"F64", 64, DType::f64},
    {"I64", 64, DType::i64},
    {"U64", 64, {}},
};

}  // namespace

const SafetensorsDType* find_safetensors_dtype(std::string_view name) {
  for (const SafetensorsDType& t : types) {
    if (t.name == name) return &t;
  }
  return nullptr;
}

int safetensors_rank(DType dtype) {
  for (int i = 0; i < static_cast<int>(std::size(types)); ++i) {
    if (types[i].ours == dtype) return i;
  }
  fail(Exit::internal, "the safetensors format has no element type for {}", name_of(dtype));
}

}  // namespace detail

std::string_view safetensors_name(DType dtype) {
  return detail::types[detail::safetensors_rank(dtype)].name;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::optional<int64_t> checked_product(const std::vector<int64_t>& shape, int64_t unit) {
  int64_t product = unit;
  bool zero = false, overflow = false;
  for (int64_t d : shape) {
    if (d < 0) return {};
    zero = zero || d == 0;
    if (d > 0) overflow = __builtin_mul_overflow(product, d, &product) || overflow;
  }
  if (overflow) return {};  // refused even where another dimension is 0
  return zero ? 0 : product;
}

}  // namespace nrl
