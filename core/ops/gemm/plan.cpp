#include "core/ops/gemm/plan.h"

#include <spdlog/fmt/fmt.h>

namespace nrl::ops::gemm {
namespace {

bool is_fp8(DType t) {
  return t == DType::e4m3 || t == DType::e5m2;
}
bool is_half(DType t) {
  return t == DType::bf16 || t == DType::f16;
}

std::string check_types(const GemmPlan& p) {
  const DType a = p.a.dtype, b = p.b.dtype, d = p.d.dtype;
  const auto pair = fmt::format("{} x {}", name_of(a), name_of(b));
  if (is_fp8(a) && is_fp8(b)) {
    if (a == DType::e5m2 && b == DType::e5m2)
      return "e5m2 x e5m2 is no product of the hardware; one side must be e4m3";
    if (!is_half(d) && d != DType::f32)
      return fmt::format("the result of FP8 operands cannot be {} here", name_of(d));
    return "";
  }
  if (a != b) return pair + ": both operands must have one type";
  if (a == DType::f32) return d == DType::f32 ? "" : "f32 operands give an f32 result";
  if (is_half(a)) return d == a || d == DType::f32 ? "" : fmt::format("{} gives {} or f32", pair, name_of(a));
  return pair + " is not supported";
}

std::string check_operand(const char* name, const Operand& o, int64_t stored_cols, bool fp8) {
  if (o.ld < stored_cols)
    return fmt::format("{} has {} columns but {} elements between rows", name, stored_cols, o.ld);
  const int64_t size = size_of(o.dtype);
  if (o.alignment < size) return fmt::format("{} is aligned to {} bytes only", name, o.alignment);
  if (!fp8) return "";
  if (o.alignment < 16) return fmt::format("{} must be aligned to 16 bytes for FP8", name);
  if (o.ld * size % 16 != 0)
    return fmt::format("the rows of {} must be multiples of 16 bytes apart for FP8", name);
  return "";
}

}  // namespace

ColumnMajor column_major(const GemmPlan& p) {
  ColumnMajor c;
  c.m = p.cols;
  c.n = p.rows;
  c.k = p.inner;
  c.transpose_a = p.b.transposed;
  c.transpose_b = p.a.transposed;
  c.a_rows = p.b.transposed ? p.inner : p.cols;
  c.a_cols = p.b.transposed ? p.cols : p.inner;
  c.b_rows = p.a.transposed ? p.rows : p.inner;
  c.b_cols = p.a.transposed ? p.inner : p.rows;
  return c;
}

std::string GemmPlan::validate(Architecture architecture) const {
  if (rows <= 0 || cols <= 0 || inner <= 0)
    return fmt::format("{} x {} x {} has an empty side", rows, cols, inner);
  if (std::string wrong = check_types(*this); !wrong.empty()) return wrong;
  if (d.transposed) return "the result cannot be transposed";
  const ColumnMajor c = column_major(*this);
  if (std::string wrong = check_operand("a", a, c.b_rows, fp8()); !wrong.empty()) return wrong;
  if (std::string wrong = check_operand("b", b, c.a_rows, fp8()); !wrong.empty()) return wrong;
  if (std::string wrong = check_operand("d", d, cols, false); !wrong.empty()) return wrong;
  if (compute == Compute::tf32 && a.dtype != DType::f32) return "tf32 is arithmetic of f32 operands";
  if (fp8()) {
    if (architecture == Architecture::sm80) return "FP8 needs compute capability 8.9 or later";
    // TN in column-major terms: a of the library transposed, b not.
    if (architecture == Architecture::sm90 && !(c.transpose_a && !c.transpose_b))
      return "FP8 on Hopper takes a (rows, inner) and b stored as (cols, inner) only: keep transposed copies";
    if (inner % 16 != 0 || cols % 16 != 0)
      return fmt::format(
          "FP8 needs an inner size and a number of columns in multiples of 16, these are {} and {}", inner,
          cols);
    if (epilogue == Epilogue::dgelu || has_aux()) return "FP8 products have no auxiliary matrix here";
  } else if (fast_accumulation) {
    return "fast accumulation is a choice of FP8 products";
  }
  if (accumulate && epilogue != Epilogue::none) return "an accumulating product has no epilogue";
  if (has_aux()) {
    if (a.dtype == DType::f32 && compute == Compute::f32)
      return "GELU with an auxiliary matrix needs 16-bit operands";
    if (aux.dtype != d.dtype) return fmt::format("the auxiliary matrix must be {}", name_of(d.dtype));
    if (aux.ld < cols) return "the rows of the auxiliary matrix overlap";
    if (aux.ld * size_of(aux.dtype) % 16 != 0 || aux.alignment < 16)
      return "the auxiliary matrix must be aligned to 16 bytes, and its rows multiples of 16 bytes apart";
  }
  if (has_bias() && bias != d.dtype && !(d.dtype == DType::f32 && is_half(bias)))
    return fmt::format("a bias of {} with a result of {}", name_of(bias), name_of(d.dtype));
  return "";
}

std::string GemmPlan::key() const {
  auto side = [](const Operand& o) {
    return fmt::format("{}{}/{}/{}", name_of(o.dtype), o.transposed ? "T" : "N", o.ld, o.alignment);
  };
  return fmt::format("{}x{}x{}_{}_{}_{}_e{}_{}_b{}_{}{}{}", rows, cols, inner, side(a), side(b), side(d),
                     static_cast<int>(epilogue), has_aux() ? side(aux) : "-",
                     has_bias() ? name_of(bias) : "-", accumulate ? "acc" : "set",
                     compute == Compute::tf32 ? "_tf32" : "", fast_accumulation ? "_fast" : "");
}

}  // namespace nrl::ops::gemm
