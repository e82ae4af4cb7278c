// RMS norm and LayerNorm on the CPU; formulas in core/ops/norm.h and, of the gradients, at backward_row().
// Rows are split over the threads. The backward pass writes dx (=) row by row and adds dweight and dbias (+=)
// from one partial sum per thread, in order.

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/norm.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/amax.h"
#include "core/ops/shared/cpu/dropout_mask.h"
#include "core/ops/shared/cpu/normalize_row.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/cpu/sums.h"
#include "core/ops/shared/rows.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 16384;

template <class T>
float row_sum(const T* x, int64_t d) {
  return sum_lanes_of(
      d, [=](int64_t i, auto part) __attribute__((always_inline)) { return part.load(x + i); });
}

/// Sum of (x - mean)^2.
template <class T>
float sum_of_squares(const T* x, int64_t d, float mean) {
  return sum_lanes_of(
      d, [=](int64_t i, auto part) __attribute__((always_inline)) {
        const Lanes c = part.load(x + i) - mean;
        return c * c;
      });
}

/// sum = dropout(x) + residual, without dropout when `mask` is null; `first` is the global element at x[0].
template <class T>
void add_residual(const T* x, const T* residual, T* sum, int64_t d, const DropoutMask* mask, int64_t first) {
  if (!mask) {
    for_lanes(d,
              [=](int64_t i, auto part) { part.store(sum + i, part.load(x + i) + part.load(residual + i)); });
    return;
  }
  const float p = mask->p, scale = mask->scale;
  mask->for_words(first, d, [=](int64_t begin, const uint32_t* words, int64_t count) {
    const T *in = x + begin, *added = residual + begin;
    T* out = sum + begin;
    for_lanes(count, [=](int64_t i, auto part) {
      part.store(out + i, DropoutMask::apply(part.load(in + i), part.load(words + i), p, scale) +
                              part.load(added + i));
    });
  });
}

/// max_magnitude() of a normed row that is not stored.
template <class T, class W>
uint32_t max_normalized(const T* in, float mean, float rstd, const W* weight, float offset, const W* bias,
                        int64_t d) {
  constexpr int64_t part = 512;
  T values[part];
  uint32_t amax = 0;
  for (int64_t c = 0; c < d; c += part) {
    const int64_t n = std::min(part, d - c);
    normalize_row(in + c, mean, rstd, weight + c, offset, bias ? bias + c : nullptr, values, n);
    amax = std::max(amax, max_magnitude(values, n));
  }
  return amax;
}

template <class T, class W, NormKind kind>
void forward(Exec& exec, const NormForward& a) {
  const int64_t d = a.x.dim(-1), rows = a.x.numel() / d;
  const Rows<const T> x(a.x), residual(a.residual);
  const Rows<T> sum(a.sum), out(a.out);
  const W* weight = data_of<const W>(a.weight);
  const W* bias = data_of<const W>(a.bias);
  const float offset = a.weight_offset;
  float* means = data_of<float>(a.mean);
  float* rstds = data_of<float>(a.rstd);
  const float inv_d = 1.0f / static_cast<float>(d), eps = a.eps;
  const FusedDropout& drop = a.dropout;
  const auto* drop_rows = static_cast<const int32_t*>(drop.rows.data);
  const DropoutMask mask(drop.p, drop.seed, drop.stream, drop.step);
  const int64_t grain = std::max<int64_t>(1, grain_elements / d);
  cpu::parallel_for(exec.threads, rows, grain, [&](int64_t begin, int64_t end) {
    uint32_t amax = 0;
    for (int64_t r = begin; r < end; ++r) {
      const T* in = x[r];
      if (residual.data) {
        add_residual(in, residual[r], sum[r], d, drop.p > 0 ? &mask : nullptr,
                     (drop.first_row + (drop_rows ? drop_rows[r] : r)) * d);
        in = sum[r];
      }
      const float mean = kind == NormKind::layer ? row_sum(in, d) * inv_d : 0.0f;
      const float rstd = 1.0f / std::sqrt(sum_of_squares(in, d, mean) * inv_d + eps);
      if (out.data) {
        T* o = out[r];
        normalize_row(in, mean, rstd, weight, offset, bias, o, d);
        if (a.amax) amax = std::max(amax, max_magnitude(o, d));
      } else if (a.amax) {
        amax = std::max(amax, max_normalized(in, mean, rstd, weight, offset, bias, d));
      }
      if (means) means[r] = mean;
      if (rstds) rstds[r] = rstd;
    }
    if (a.amax) combine_amax(data_of<float>(a.amax), amax);
  });
}

/// One row, with w = weight + offset, dy = dout * w and xhat = (x - mean) * rstd:
///   dx = rstd * (dy - mean_dy - xhat * mean_dy_xhat) + dresidual,   mean_dy = 0 for RMS norm
///   dweight += dout * xhat,   dbias += dout
template <class T, class W, NormKind kind>
void backward_row(const T* dout, const T* x, const W* weight, float offset, const T* dresidual, T* dx,
                  float* dweight, float* dbias, int64_t d, float mean, float rstd) {
  const auto dy = [=](int64_t i, auto part) __attribute__((always_inline)) {
    return part.load(dout + i) * (part.load(weight + i) + offset);
  };
  const auto dy_centered = [=](int64_t i, auto part) __attribute__((always_inline)) {
    return dy(i, part) * (part.load(x + i) - mean);
  };
  const float sum_dy_centered = sum_lanes_of(d, dy_centered),
              sum_dy = kind == NormKind::layer ? sum_lanes_of(d, dy) : 0.0f;
  const float inv_d = 1.0f / static_cast<float>(d);
  const float mean_dy_xhat = sum_dy_centered * rstd * inv_d, mean_dy = sum_dy * inv_d;
  auto sweep = [=](auto with_dweight, auto with_dbias, auto with_dresidual) {
    for_lanes(d, [=](int64_t i, auto part) {
      const Lanes g = part.load(dout + i), xhat = (part.load(x + i) - mean) * rstd;
      if constexpr (with_dweight) part.store(dweight + i, part.load(dweight + i) + g * xhat);
      if constexpr (with_dbias) part.store(dbias + i, part.load(dbias + i) + g);
      Lanes value = rstd * (g * (part.load(weight + i) + offset) - mean_dy - xhat * mean_dy_xhat);
      if constexpr (with_dresidual) value += part.load(dresidual + i);
      part.store(dx + i, value);
    });
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (dweight && dbias) {
    dresidual ? sweep(yes, yes, yes) : sweep(yes, yes, no);
  } else if (dweight) {
    dresidual ? sweep(yes, no, yes) : sweep(yes, no, no);
  } else if (dbias) {
    dresidual ? sweep(no, yes, yes) : sweep(no, yes, no);
  } else {
    dresidual ? sweep(no, no, yes) : sweep(no, no, no);
  }
}

template <class T, class W, NormKind kind>
void backward(Exec& exec, const NormBackward& a) {
  const int64_t d = a.x.dim(-1), rows = a.x.numel() / d;
  const Rows<const T> dout(a.dout), x(a.x), dresidual(a.dresidual);
  const Rows<T> dx(a.dx);
  const W* weight = data_of<const W>(a.weight);
  const float* means = data_of<const float>(a.mean);
  const float* rstds = data_of<const float>(a.rstd);
  float* dweight = data_of<float>(a.dweight);
  float* dbias = data_of<float>(a.dbias);
  // Rows are cut into as many parts as there are threads; each part sums into its own scratch, and the parts
  // are added in order.
  float* scratch = reinterpret_cast<float*>(exec.workspace.data);
  const int64_t parts = std::clamp<int64_t>(rows * d / grain_elements, 1, exec.threads);
  cpu::parallel_for(static_cast<int>(parts), parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* dw = dweight ? scratch + part * 2 * d : nullptr;
      float* db = dbias ? scratch + part * 2 * d + d : nullptr;
      if (dw) std::fill(dw, dw + d, 0.0f);
      if (db) std::fill(db, db + d, 0.0f);
      uint32_t amax = 0;
      for (int64_t r = rows * part / parts, last = rows * (part + 1) / parts; r < last; ++r) {
        backward_row<T, W, kind>(dout[r], x[r], weight, a.weight_offset,
                                 dresidual.data ? dresidual[r] : nullptr, dx[r], dw, db, d,
                                 kind == NormKind::layer ? means[r] : 0.0f, rstds[r]);
        if (a.amax) amax = std::max(amax, max_magnitude(dx[r], d));
      }
      if (a.amax) combine_amax(data_of<float>(a.amax), amax);
    }
  });
  for (int64_t part = 0; part < parts; ++part) {
    const float* dw = scratch + part * 2 * d;
    const float* db = dw + d;
    for (int64_t i = 0; dweight && i < d; ++i) dweight[i] += dw[i];
    for (int64_t i = 0; dbias && i < d; ++i) dbias[i] += db[i];
  }
}

/// Element types of activations and weights, and the kind, become template arguments.
template <class Body>
void with_types(DType x, DType weight, NormKind kind, const Body& body) {
  for_float_pair(x, weight, [&]<class T, class W>() {
    if (kind == NormKind::rms) {
      body.template operator()<T, W, NormKind::rms>();
    } else {
      body.template operator()<T, W, NormKind::layer>();
    }
  });
}

void norm_forward_kernel(Exec& exec, const NormForward& a) {
  with_types(a.x.dtype, a.weight.dtype, a.kind,
             [&]<class T, class W, NormKind kind>() { forward<T, W, kind>(exec, a); });
}

void norm_backward_kernel(Exec& exec, const NormBackward& a) {
  with_types(a.x.dtype, a.weight.dtype, a.kind,
             [&]<class T, class W, NormKind kind>() { backward<T, W, kind>(exec, a); });
}

}  // namespace

void fill_norm(KernelTable& table) {
  table.norm_forward = norm_forward_kernel;
  table.norm_backward = norm_backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
