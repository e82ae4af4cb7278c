#pragma once
// Forward kernels of QK-norm with RoPE; included by cuda.cu alone. For every head of q and of k
//
//   rstd = 1 / sqrt(mean(x^2) + eps),   y = x * rstd * weight,   out = y rotated by the token's angles
//
// Reads x, weights, the table of cosines and sines. Writes (=) out and rstd.
//
// qk_forward_kernel: `threads_per_head` neighboring threads, a power of two up to a warp, take a head, with
// two packs (Slot) each; the grid strides over the heads of q, then of k. qk_forward_any_kernel: a warp per
// head, for heads of any length and alignment.

#include "core/ops/qk_norm_rope/heads.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

// Registers allow `forward_resident` blocks on a multiprocessor.
constexpr int forward_threads = 256, forward_resident = 4;

template <class T>
struct QkForwardArguments {
  const T* x;
  T* out;
  int64_t x_token, x_head, out_token, out_head;  ///< strides
  int64_t tokens;
  int d;
  float eps, inverse_d;
  FloatVector<T> q_weight, k_weight;
  float* rstd;
  Rotation rotation;
};

template <class T>
__global__ void __launch_bounds__(forward_threads, forward_resident)
    qk_forward_kernel(QkForwardArguments<T> a, HeadTasks<1> tasks, int threads_per_head) {
  constexpr int E = per_pack<T>;
  NRL_DYN_SHARED(float, weights);
  share_weights(a, weights);
  RowGroup group(threads_per_head);
  const int tasks_per_block = forward_threads / threads_per_head;
  const Slot slot = Slot::of<E>(group.lane(), a.d, a.rotation.half);
  const int64_t task_count = tasks.q_tasks + tasks.k_tasks;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * tasks_per_block; base < task_count;
       base += static_cast<int64_t>(gridDim.x) * tasks_per_block) {
    const int64_t number = base + group.index();
    const HeadTask<1> task = number < tasks.q_tasks ? tasks.q(number) : tasks.k(number - tasks.q_tasks);
    const bool valid = number < task_count && slot.valid;
    float u[E] = {}, v[E] = {}, cosines[E], sines[E], squares = 0;
    if (valid) {
      const T* x = a.x + task.token * a.x_token + task.head * a.x_head;
      load_floats(x + slot.first, u);
      load_floats(x + slot.second, v);
      if (slot.rotated) a.rotation.angles(task.token, slot.first, cosines, sines);
    }
#pragma unroll
    for (int i = 0; i < E; ++i) squares += u[i] * u[i] + v[i] * v[i];
    const float rstd = rsqrtf(group.sum(squares) * a.inverse_d + a.eps);
    if (!valid) continue;
    const float* weight = weights + (task.head < tasks.heads ? 0 : a.d);
    float first_weight[E], second_weight[E];
    load_floats(weight + slot.first, first_weight);
    load_floats(weight + slot.second, second_weight);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      u[i] *= rstd * first_weight[i];
      v[i] *= rstd * second_weight[i];
    }
    if (slot.rotated) rotate(u, v, cosines, sines);
    T* out = a.out + task.token * a.out_token + task.head * a.out_head;
    store_floats(out + slot.first, u);
    store_floats(out + slot.second, v);
    if (group.lane() == 0) a.rstd[tasks.statistic(a.tokens, task.token, task.head)] = rstd;
  }
}

template <class T>
__global__ void __launch_bounds__(forward_threads)
    qk_forward_any_kernel(QkForwardArguments<T> a, HeadTasks<1> tasks) {
  constexpr int tasks_per_block = forward_threads / kernel::warp;
  RowGroup group(kernel::warp);
  const int half = a.rotation.half;
  const int64_t task_count = tasks.q_tasks + tasks.k_tasks;
  for (int64_t number = static_cast<int64_t>(blockIdx.x) * tasks_per_block + group.index();
       number < task_count; number += static_cast<int64_t>(gridDim.x) * tasks_per_block) {
    const HeadTask<1> task = number < tasks.q_tasks ? tasks.q(number) : tasks.k(number - tasks.q_tasks);
    const T* x = a.x + task.token * a.x_token + task.head * a.x_head;
    T* out = a.out + task.token * a.out_token + task.head * a.out_head;
    const FloatVector<T>& weight = task.head < tasks.heads ? a.q_weight : a.k_weight;
    float squares = 0;
    for (int i = group.lane(); i < a.d; i += kernel::warp) {
      const auto v = static_cast<float>(x[i]);
      squares += v * v;
    }
    const float rstd = rsqrtf(group.sum(squares) * a.inverse_d + a.eps);
    auto normed = [&](int i) {
      float w[1];
      weight.get(i, w);
      return static_cast<float>(x[i]) * (rstd * w[0]);
    };
    for (int i = group.lane(); i < half; i += kernel::warp) {
      float u[1] = {normed(i)}, v[1] = {normed(half + i)}, cosine[1], sine[1];
      a.rotation.angles(task.token, i, cosine, sine);
      rotate(u, v, cosine, sine);
      out[i] = T(u[0]);
      out[half + i] = T(v[0]);
    }
    for (int i = 2 * half + group.lane(); i < a.d; i += kernel::warp) out[i] = T(normed(i));
    if (group.lane() == 0) a.rstd[tasks.statistic(a.tokens, task.token, task.head)] = rstd;
  }
}

template <class T>
void forward(Exec& exec, const QkNormRopeForward& f) {
  const int64_t q = f.heads, k = f.x.dim(1) - f.heads;
  QkForwardArguments<T> a{};
  a.x = static_cast<const T*>(f.x.data);
  a.out = static_cast<T*>(f.out.data);
  a.x_token = f.x.step(0), a.x_head = f.x.step(1);
  a.out_token = f.out.step(0), a.out_head = f.out.step(1);
  a.tokens = f.x.dim(0);
  a.d = static_cast<int>(f.x.dim(2));
  a.eps = f.eps;
  a.inverse_d = 1.0f / static_cast<float>(a.d);
  a.q_weight = FloatVector<T>(f.q_weight, f.weight_offset);
  a.k_weight = FloatVector<T>(f.k_weight, f.weight_offset);
  a.rstd = static_cast<float*>(f.rstd.data);
  a.rotation = Rotation(f.table, f.positions, false);
  const bool packed = packed_heads(f.x, f.table) && packed_heads(f.out, f.table) &&
                      kernel::aligned16(f.q_weight.data) && kernel::aligned16(f.k_weight.data);
  const HeadTasks<1> tasks(a.tokens, q, k);
  if (packed) {
    const int threads_per_head = power_of_two(a.d / (2 * per_pack<T>));
    const unsigned grid = kernel::grid_for(tasks.q_tasks + tasks.k_tasks, forward_threads / threads_per_head,
                                           exec.multiprocessors, forward_resident);
    const size_t weights = 2 * static_cast<size_t>(a.d) * sizeof(float);
    NRL_LAUNCH((qk_forward_kernel<T>), grid, forward_threads, weights, exec.stream, a, tasks,
               threads_per_head);
  } else {
    const unsigned grid = kernel::grid_for(tasks.q_tasks + tasks.k_tasks, forward_threads / kernel::warp,
                                           exec.multiprocessors, 16);
    NRL_LAUNCH((qk_forward_any_kernel<T>), grid, forward_threads, 0, exec.stream, a, tasks);
  }
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
