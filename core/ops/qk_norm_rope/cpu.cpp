// QK-norm with RoPE on the CPU; formulas at forward_head() and backward_head(). The forward pass splits heads
// over the threads. The backward pass overwrites dout with dx (=) and adds the weights' gradients (+=) from
// one partial sum per thread, in order.

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/cpu/sums.h"
#include "core/ops/shared/element.h"
#include "core/ops/shared/rows.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 16384;

/// The rows of (N, heads + kv_heads, D): whether a row is of q, and its index in rstd.
struct Heads {
  int64_t tokens, q, all;
  bool is_q(int64_t row) const { return row % all < q; }
  int64_t statistic(int64_t row) const {
    const int64_t token = row / all, head = row % all;
    return head < q ? token * q + head : tokens * q + token * (all - q) + (head - q);
  }
};

/// cos[0..half), then sin[0..half), of a token's position; null without a table.
struct Angles {
  const float* table;
  const int32_t* positions;
  int64_t half;
  Angles(const Tensor& t, const Tensor& p)
      : table(data_of<const float>(t)), positions(data_of<const int32_t>(p)), half(t ? t.dim(1) / 2 : 0) {}
  const float* of(int64_t token) const { return table ? table + positions[token] * 2 * half : nullptr; }
};

/// out = (x * rstd * (weight + offset)) rotated, for a head of length d whose first 2 * half elements are
/// rotated.
template <class T, class W>
void forward_head(const T* x, const W* weight, float offset, const float* cosines, int64_t half, T* out,
                  int64_t d, float rstd) {
  const float* sines = cosines + half;
  for_lanes(half, [=](int64_t i, auto part) {
    const auto y =
        element::rope_pair(part.load(x + i) * (rstd * (part.load(weight + i) + offset)),
                           part.load(x + half + i) * (rstd * (part.load(weight + half + i) + offset)),
                           part.load(cosines + i), part.load(sines + i));
    part.store(out + i, y.first);
    part.store(out + half + i, y.second);
  });
  x += 2 * half, weight += 2 * half, out += 2 * half;
  for_lanes(d - 2 * half, [=](int64_t i, auto part) {
    part.store(out + i, part.load(x + i) * (rstd * (part.load(weight + i) + offset)));
  });
}

template <class T, class W>
void forward(Exec& exec, const QkNormRopeForward& a) {
  const int64_t d = a.x.dim(2), rows = a.x.dim(0) * a.x.dim(1);
  const Heads heads{a.x.dim(0), a.heads, a.x.dim(1)};
  const Angles angles(a.table, a.positions);
  const Rows<const T> x(a.x);
  const Rows<T> out(a.out);
  const W *q_weight = data_of<const W>(a.q_weight), *k_weight = data_of<const W>(a.k_weight);
  float* rstds = data_of<float>(a.rstd);
  const float inv_d = 1.0f / static_cast<float>(d), eps = a.eps;
  const int64_t grain = std::max<int64_t>(1, grain_elements / d);
  cpu::parallel_for(exec.threads, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* in = x[r];
      const float squares = sum_lanes_of(
          d, [=](int64_t i, auto part) __attribute__((always_inline)) {
            const Lanes v = part.load(in + i);
            return v * v;
          });
      const float rstd = 1.0f / std::sqrt(squares * inv_d + eps);
      forward_head(in, heads.is_q(r) ? q_weight : k_weight, a.weight_offset, angles.of(r / heads.all),
                   angles.half, out[r], d, rstd);
      rstds[heads.statistic(r)] = rstd;
    }
  });
}

/// One head in place, with dout rotated back, w = weight + offset, dy = dout * w and xhat = x * rstd:
///   dx = rstd * (dy - xhat * mean_dy_xhat),   dweight += dout * xhat
/// dout is rotated back twice, for the sums and for dx: storing it in between would round it.
template <class T, class W>
void backward_head(T* dx, const T* x, const W* weight, float offset, const float* cosines, int64_t half,
                   float* dweight, int64_t d, float rstd) {
  const float* sines = cosines + half;
  // Adds a vector of elements to dweight and returns its terms of sum_dy_xhat.
  const auto add_element = [=](auto part, Lanes dy, int64_t i) __attribute__((always_inline)) {
    const Lanes u = dy * (part.load(x + i) * rstd);
    part.store(dweight + i, part.load(dweight + i) + u);
    return u * (part.load(weight + i) + offset);
  };
  const float sum_dy_xhat =
      sum_lanes_of(
          half,
          [=](int64_t i, auto part) __attribute__((always_inline)) {
            const auto dy = element::rope_pair(part.load(dx + i), part.load(dx + half + i),
                                               part.load(cosines + i), -part.load(sines + i));
            return add_element(part, dy.first, i) + add_element(part, dy.second, half + i);
          }) +
      sum_lanes_of(
          d - 2 * half, [=](int64_t i, auto part) __attribute__((always_inline)) {
            return add_element(part, part.load(dx + 2 * half + i), 2 * half + i);
          });
  const float mean_dy_xhat = sum_dy_xhat / static_cast<float>(d);
  const auto gradient = [=](auto part, Lanes dy, int64_t i) __attribute__((always_inline)) {
    return rstd * (dy * (part.load(weight + i) + offset) - part.load(x + i) * rstd * mean_dy_xhat);
  };
  for_lanes(half, [=](int64_t i, auto part) {
    const auto dy = element::rope_pair(part.load(dx + i), part.load(dx + half + i), part.load(cosines + i),
                                       -part.load(sines + i));
    part.store(dx + i, gradient(part, dy.first, i));
    part.store(dx + half + i, gradient(part, dy.second, half + i));
  });
  for_lanes(d - 2 * half, [=](int64_t i, auto part) {
    const int64_t at = 2 * half + i;
    part.store(dx + at, gradient(part, part.load(dx + at), at));
  });
}

template <class T, class W>
void backward(Exec& exec, const QkNormRopeBackward& a) {
  const int64_t d = a.dx.dim(2), rows = a.dx.dim(0) * a.dx.dim(1);
  const Heads heads{a.dx.dim(0), a.heads, a.dx.dim(1)};
  const Angles angles(a.table, a.positions);
  const Rows<const T> x(a.x);
  const Rows<T> dx(a.dx);
  const W *q_weight = data_of<const W>(a.q_weight), *k_weight = data_of<const W>(a.k_weight);
  const float* rstds = data_of<const float>(a.rstd);
  // Every part sums q's and k's vector into its own scratch, and the parts are added in order.
  float* scratch = reinterpret_cast<float*>(exec.workspace.data);
  const int64_t parts = std::clamp<int64_t>(rows * d / grain_elements, 1, exec.threads);
  cpu::parallel_for(static_cast<int>(parts), parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* sums = scratch + part * 2 * d;
      std::fill(sums, sums + 2 * d, 0.0f);
      for (int64_t r = rows * part / parts, last = rows * (part + 1) / parts; r < last; ++r) {
        const bool q = heads.is_q(r);
        backward_head(dx[r], x[r], q ? q_weight : k_weight, a.weight_offset, angles.of(r / heads.all),
                      angles.half, q ? sums : sums + d, d, rstds[heads.statistic(r)]);
      }
    }
  });
  float *dq = data_of<float>(a.dq_weight), *dk = data_of<float>(a.dk_weight);
  for (int64_t part = 0; part < parts; ++part) {
    const float* sums = scratch + part * 2 * d;
    for (int64_t i = 0; dq && i < d; ++i) dq[i] += sums[i];
    for (int64_t i = 0; dk && i < d; ++i) dk[i] += sums[d + i];
  }
}

void qk_forward_kernel(Exec& exec, const QkNormRopeForward& a) {
  for_float_pair(a.x.dtype, a.q_weight.dtype, [&]<class T, class W>() { forward<T, W>(exec, a); });
}

void qk_backward_kernel(Exec& exec, const QkNormRopeBackward& a) {
  for_float_pair(a.dx.dtype, a.q_weight.dtype, [&]<class T, class W>() { backward<T, W>(exec, a); });
}

}  // namespace

void fill_qk_norm_rope(KernelTable& table) {
  table.qk_norm_rope_forward = qk_forward_kernel;
  table.qk_norm_rope_backward = qk_backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
