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
      return "e5m2 x e5m2 is not supported by tensor cores; one operand must be e4m3";
    if (!is_half(d) && d != DType::f32)
      return fmt::format("the result of FP8 operands cannot be {} here", name_of(d));
    return "";
  }
  if (a != b) return pair + ": both operands must have one type";
  if (a == DType::f32) return d == DType::f32 ? "" : "f32 operands give an f32 result";
  if (is_half(a)) return d == a || d == DType::f32 ? "" : fmt::format("{} gives {} or f32", pair, name_of(a));
  return pair + " is not supported";
}

bool is_scaled_by_128(Scaling s) {
  return s == Scaling::row128 || s == Scaling::block128;
}

// Which scalings the tensor cores of an architecture multiply.
std::string check_scaling(const GemmPlan& p, Architecture architecture) {
  const Scaling a = p.a.scaling, b = p.b.scaling;
  if (p.d.scaling != Scaling::none) return "the result cannot be scaled";
  if (!p.fp8()) {
    if (a == Scaling::none && b == Scaling::none) return "";
    return fmt::format("{} operands take no scales", name_of(p.a.dtype));
  }
  const auto pair = fmt::format("{} x {} scales", name_of(a), name_of(b));
  if (a == Scaling::none || b == Scaling::none) return pair + ": FP8 operands need scales";
  if (a == Scaling::tensor && b == Scaling::tensor) return "";
  if (a == Scaling::mx32 && b == Scaling::mx32) {
    if (architecture < Architecture::sm100)
      return "scales of 32 numbers need compute capability 10.0 (Blackwell)";
    if (p.inner % 32 != 0)
      return fmt::format("mx32 scales need an inner size in multiples of 32, not {}", p.inner);
    return "";
  }
  if (!is_scaled_by_128(a) || !is_scaled_by_128(b)) return pair + " cannot be combined";
  if (architecture != Architecture::sm90) return "scales of 128 numbers need compute capability 9.0 (Hopper)";
  if (a == Scaling::block128 && b == Scaling::block128) return pair + ": one operand must have row128 scales";
  if (p.inner % 128 != 0)
    return fmt::format("{} need an inner size in multiples of 128, not {}", pair, p.inner);
  if (a == Scaling::row128 && p.rows % 8 != 0)
    return fmt::format("row128 scales of a need rows in multiples of 8, not {}", p.rows);
  if (p.fast_accumulation)
    return pair + " are applied between partial sums: fast accumulation is not available";
  if (p.epilogue != Epilogue::none && p.epilogue != Epilogue::bias)
    return pair + " allow only a bias as epilogue";
  return "";
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
    if (architecture == Architecture::sm80) return "FP8 needs compute capability 9.0 or later";
    // TN in column-major terms: a of the library transposed, b not.
    if (architecture == Architecture::sm90 && !(c.transpose_a && !c.transpose_b))
      return "FP8 on Hopper takes a (rows, inner) and b stored as (cols, inner) only: keep transposed copies";
    if (inner % 16 != 0 || cols % 16 != 0)
      return fmt::format(
          "FP8 needs an inner size and a number of columns in multiples of 16, these are {} and {}", inner,
          cols);
    if (has_aux()) return "FP8 GEMMs have no auxiliary matrix here";
    if (has_bias() && (d.dtype == DType::f32 ? bias != DType::bf16 : bias != d.dtype))
      return fmt::format("FP8 GEMMs add no bias in {} to {}", name_of(bias), name_of(d.dtype));
  } else if (fast_accumulation) {
    return "fast accumulation is an option of FP8 GEMMs";
  }
  if (std::string wrong = check_scaling(*this, architecture); !wrong.empty()) return wrong;
  if (accumulate && epilogue != Epilogue::none) return "an accumulating GEMM has no epilogue";
  if (has_aux()) {
    if (a.dtype == DType::f32 && compute == Compute::f32)
      return "GELU with an auxiliary matrix needs 16-bit operands";
    if (aux.dtype != d.dtype) return fmt::format("the auxiliary matrix must be {}", name_of(d.dtype));
    if (aux.ld < cols) return "the rows of the auxiliary matrix overlap";
    if (aux.ld * size_of(aux.dtype) % 16 != 0 || aux.alignment < 16)
      return "the auxiliary matrix must be aligned to 16 bytes, and its rows multiples of 16 bytes apart";
  }
  if (has_bias() && !fp8() && bias != d.dtype)
    return fmt::format("a bias of {} with a result of {}", name_of(bias), name_of(d.dtype));
  return "";
}

std::string GemmPlan::key() const {
  auto side = [](const Operand& o) {
    const std::string scales = o.scaling == Scaling::none ? "" : fmt::format("/{}", name_of(o.scaling));
    return fmt::format("{}{}/{}/{}{}", name_of(o.dtype), o.transposed ? "T" : "N", o.ld, o.alignment, scales);
  };
  return fmt::format("{}x{}x{}_{}_{}_{}_e{}_{}_b{}_{}{}{}", rows, cols, inner, side(a), side(b), side(d),
                     static_cast<int>(epilogue), has_aux() ? side(aux) : "-",
                     has_bias() ? name_of(bias) : "-", accumulate ? "acc" : "set",
                     compute == Compute::tf32 ? "_tf32" : "", fast_accumulation ? "_fast" : "");
}

size_t PlanHash::operator()(const GemmPlan& p) const {
  uint64_t hash = 0;
  const auto add = [&hash](auto value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  };
  add(p.rows), add(p.cols), add(p.inner);
  for (const Operand* o : {&p.a, &p.b, &p.d, &p.aux})
    add(o->ld), add(static_cast<int>(o->dtype) | static_cast<int>(o->scaling) << 8 | o->alignment << 16 |
                    (o->transposed ? 1 << 30 : 0));
  add(static_cast<int>(p.epilogue) | static_cast<int>(p.bias) << 8 | static_cast<int>(p.compute) << 16 |
      (p.accumulate ? 1 << 24 : 0) | (p.fast_accumulation ? 1 << 25 : 0));
  return static_cast<size_t>(hash);
}

}  // namespace nrl::ops::gemm
