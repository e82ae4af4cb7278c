#include "core/ops/rope.h"

#include <algorithm>
#include <cmath>

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

constexpr double pi = 3.14159265358979323846;

/// Base of `dynamic`: stretched so that the longest wavelength grows with the sequence (NTK-aware scaling).
double dynamic_base(const RopeSpec& s, int64_t sequence_length) {
  const double d = static_cast<double>(s.rotary_dim), m = static_cast<double>(s.original_max_position);
  const double length = std::max(static_cast<double>(sequence_length), m);
  return s.theta * std::pow(s.factor * length / m - (s.factor - 1.0), d / (d - 2.0));
}

/// Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended.
double llama3_frequency(const RopeSpec& s, double inv) {
  const double original = static_cast<double>(s.original_max_position), wavelength = 2.0 * pi / inv;
  if (wavelength < original / s.high_freq_factor) return inv;
  if (wavelength > original / s.low_freq_factor) return inv / s.factor;
  const double smooth =
      (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1.0 - smooth) * inv / s.factor + smooth * inv;
}

/// YaRN: the dimensions between those that turn beta_fast and beta_slow times within the original context are
/// blended from extrapolation (kept) to interpolation (stretched).
struct YarnRamp {
  double low, high;

  explicit YarnRamp(const RopeSpec& s) {
    const double d = static_cast<double>(s.rotary_dim), m = static_cast<double>(s.original_max_position);
    auto dimension = [&](double turns) {
      return d * std::log(m / (turns * 2.0 * pi)) / (2.0 * std::log(s.theta));
    };
    low = dimension(s.beta_fast);
    high = dimension(s.beta_slow);
    if (s.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, d - 1.0);
    if (low == high) high += 0.001;
  }
  double operator()(int64_t i) const {
    return std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  }
};

void check_spec(const RopeSpec& s) {
  NRL_CHECK(s.rotary_dim > 0 && s.rotary_dim % 2 == 0, "rope: rotary_dim {}", s.rotary_dim);
  NRL_CHECK(s.theta > 0 && s.factor > 0, "rope: theta {}, factor {}", s.theta, s.factor);
  const bool needs_original =
      s.kind == RopeKind::dynamic || s.kind == RopeKind::llama3 || s.kind == RopeKind::yarn;
  NRL_CHECK(!needs_original || s.original_max_position > 0, "rope: original_max_position is missing");
  NRL_CHECK(s.kind != RopeKind::dynamic || s.rotary_dim > 2, "rope: dynamic scaling of rotary_dim 2");
  NRL_CHECK(s.kind != RopeKind::llama3 || s.high_freq_factor > s.low_freq_factor,
            "rope: high_freq_factor {} <= {}", s.high_freq_factor, s.low_freq_factor);
}

}  // namespace

std::vector<float> rope_table(const RopeSpec& spec, int64_t positions, int64_t sequence_length) {
  check_spec(spec);
  NRL_CHECK(positions >= 0, "rope: {} positions", positions);
  const int64_t half = spec.rotary_dim / 2;
  const double base = spec.kind == RopeKind::dynamic ? dynamic_base(spec, sequence_length) : spec.theta;
  double attention_factor = 1.0;
  if (spec.kind == RopeKind::yarn) {
    attention_factor = spec.attention_factor != 0.0 ? spec.attention_factor
                       : spec.factor <= 1.0         ? 1.0
                                                    : 0.1 * std::log(spec.factor) + 1.0;
  }
  std::vector<float> inverse(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    double inv = std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(spec.rotary_dim));
    if (spec.kind == RopeKind::linear) inv /= spec.factor;
    if (spec.kind == RopeKind::llama3) inv = llama3_frequency(spec, inv);
    if (spec.kind == RopeKind::yarn) {
      const double ramp = YarnRamp(spec)(i);
      inv = inv / spec.factor * ramp + inv * (1.0 - ramp);
    }
    inverse[static_cast<size_t>(i)] = static_cast<float>(inv);
  }
  // Published models were trained with angles rounded to f32 (position * f32 frequency), so ours are too.
  std::vector<float> table(static_cast<size_t>(positions * spec.rotary_dim));
  for (int64_t p = 0; p < positions; ++p) {
    float* row = table.data() + p * spec.rotary_dim;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(static_cast<float>(p) * inverse[static_cast<size_t>(i)]);
      row[i] = static_cast<float>(std::cos(angle) * attention_factor);
      row[half + i] = static_cast<float>(std::sin(angle) * attention_factor);
    }
  }
  return table;
}

Cost cost(const Exec&, const Rope& a) {
  const double rotated = static_cast<double>(a.x.dim(0) * a.x.dim(1) * a.table.dim(1) * size_of(a.x.dtype));
  return {.read = rotated + bytes_of(a.positions) + rope_table_bytes(a.table, a.positions),
          .written = rotated};
}

double rope_table_bytes(const Tensor& table, const Tensor& positions) {
  if (!table) return 0;
  const int64_t rows = std::min(table.dim(0), positions.dim(0));
  return static_cast<double>(rows * table.dim(1) * size_of(table.dtype));
}

void rope(Exec& exec, const Rope& a) {
  if (noted(exec, Kernel::rope, a)) return;
  NRL_CHECK(a.x.data && a.x.rank == 3 && is_float(a.x) && dense_rows(a.x),
            "rope: x is {}, wanted f32, bf16 or f16 (N, heads, D) with contiguous last dimension",
            describe(a.x));
  NRL_CHECK(a.table.data && a.table.rank == 2 && a.table.dtype == DType::f32 && a.table.contiguous() &&
                a.table.dim(1) % 2 == 0 && a.table.dim(1) <= a.x.dim(2),
            "rope: table is {}, x is {}", describe(a.table), describe(a.x));
  NRL_CHECK(is_vector(a.positions, a.x.dim(0), DType::i32), "rope: positions is {}, x is {}",
            describe(a.positions), describe(a.x));
  NRL_CHECK(!a.amax || is_vector(a.amax, 1, DType::f32), "rope: amax is {}", describe(a.amax));
  const trace::Range range = traced(exec, Kernel::rope, a);
  if (a.x.numel() > 0) exec.kernels->rope(exec, a);
}

}  // namespace nrl::ops
