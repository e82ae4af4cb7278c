#pragma once
// Backward kernels of QK-norm with RoPE; included by cuda.cu alone. For every head of q and of k, with
// xhat = x * rstd and dout rotated back by the token's angles,
//
//   dy = dout * weight,   dx = rstd * (dy - xhat * mean_dy_xhat),   dweight += sum over heads of dout * xhat
//
// Reads x, rstd, weights, the table. Writes dx (=) over dout, and one partial sum of dq_weight and dk_weight
// per block (=, workspace); add_partials_kernel adds those to the gradients (+=).
//
// qk_backward_kernel: `threads_per_head` neighboring threads take a task of up to backward_heads heads of one
// token, with two packs (Slot) of each, and copy their next task to shared memory meanwhile; the grid strides
// over the tasks of q, then of k. For heads of any length and alignment qk_columns_kernel makes the partial
// sums (a thread per column) and qk_backward_any_kernel dx (a warp per head).

#include "core/ops/qk_norm_rope/heads.cuh"
#include "core/ops/shared/gpu/partials.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

// Registers allow `backward_resident` blocks on a multiprocessor.
constexpr int backward_threads = 256, backward_resident = 2, backward_heads = 2;

template <class T>
struct QkBackwardArguments {
  const T* x;
  T* dx;                                       ///< holds dout
  int64_t x_token, x_head, dx_token, dx_head;  ///< strides
  int64_t tokens;
  int d;
  float inverse_d;
  FloatVector<T> q_weight, k_weight;
  const float* rstd;
  Rotation rotation;  ///< the transpose
  bool with_weight;   ///< partial sums of dq_weight and dk_weight are wanted
  Partials partials;
};

/// In the ring of two tasks a thread reads only what it copied itself.
template <class T>
__global__ void __launch_bounds__(backward_threads, backward_resident)
    qk_backward_kernel(QkBackwardArguments<T> a, HeadTasks<backward_heads> tasks, int threads_per_head) {
  constexpr int E = per_pack<T>;
  NRL_DYN_SHARED(uint4, ring);  // (stage, head, two packs of dout and two of x, thread)
  RowGroup group(threads_per_head);
  const int tasks_per_block = backward_threads / threads_per_head;
  const int64_t stride = int64_t{gridDim.x} * tasks_per_block;
  const Slot slot = Slot::of<E>(group.lane(), a.d, a.rotation.half);
  const auto at = [&](int stage, int head, int pack) {
    return ring + ((stage * backward_heads + head) * 4 + pack) * backward_threads + threadIdx.x;
  };
  for (int which = 0; which < 2; ++which) {
    const int64_t task_count = which == 0 ? tasks.q_tasks : tasks.k_tasks;
    const FloatVector<T>& weight = which == 0 ? a.q_weight : a.k_weight;
    float first_sum[E] = {}, second_sum[E] = {}, first_weight[E], second_weight[E];
    if (slot.valid) {
      weight.get(slot.first, first_weight);
      weight.get(slot.second, second_weight);
    }
    const auto task_of = [&](int64_t number) {
      HeadTask<backward_heads> task = which == 0 ? tasks.q(number) : tasks.k(number);
      if (number >= task_count || !slot.valid) task.valid = 0;
      return task;
    };
    float next_rstd[backward_heads] = {};
    const auto fetch = [&](int64_t number, int stage) {
      const HeadTask<backward_heads> task = task_of(number);
      const T *x = a.x + task.token * a.x_token + task.head * a.x_head,
              *dout = a.dx + task.token * a.dx_token + task.head * a.dx_head;
#pragma unroll
      for (int h = 0; h < backward_heads; ++h) {
        if (h >= task.valid) continue;
        nrl_cp_async16(at(stage, h, 0), dout + h * a.dx_head + slot.first);
        nrl_cp_async16(at(stage, h, 1), dout + h * a.dx_head + slot.second);
        nrl_cp_async16(at(stage, h, 2), x + h * a.x_head + slot.first);
        nrl_cp_async16(at(stage, h, 3), x + h * a.x_head + slot.second);
        next_rstd[h] = a.rstd[tasks.statistic(a.tokens, task.token, task.head + h)];
      }
      nrl_cp_async_commit();
    };
    const auto read = [&](int stage, int head, int pack, float(&v)[E]) {
      load_floats(reinterpret_cast<const T*>(at(stage, head, pack)), v);
    };
    int64_t base = int64_t{blockIdx.x} * tasks_per_block;
    fetch(base + group.index(), 0);
    for (int stage = 0; base < task_count; base += stride, stage ^= 1) {
      const HeadTask<backward_heads> task = task_of(base + group.index());
      float rstds[backward_heads], cosines[E], sines[E];
#pragma unroll
      for (int h = 0; h < backward_heads; ++h) rstds[h] = next_rstd[h];
      fetch(base + stride + group.index(), stage ^ 1);
      if (task.valid > 0 && slot.rotated) a.rotation.angles(task.token, slot.first, cosines, sines);
      nrl_cp_async_wait<1>();
#pragma unroll
      for (int h = 0; h < backward_heads; ++h) {
        float u[E], v[E], u_hat[E], v_hat[E], sum_dy_xhat = 0;
        const float rstd = rstds[h];
        if (h < task.valid) {
          read(stage, h, 0, u);
          read(stage, h, 1, v);
          read(stage, h, 2, u_hat);
          read(stage, h, 3, v_hat);
          if (slot.rotated) rotate(u, v, cosines, sines);
#pragma unroll
          for (int i = 0; i < E; ++i) {
            u_hat[i] *= rstd;
            v_hat[i] *= rstd;
            first_sum[i] += u[i] * u_hat[i];
            second_sum[i] += v[i] * v_hat[i];
            u[i] *= first_weight[i];
            v[i] *= second_weight[i];
            sum_dy_xhat += u[i] * u_hat[i] + v[i] * v_hat[i];
          }
        }
        const float mean_dy_xhat = group.sum(sum_dy_xhat) * a.inverse_d;
        if (h >= task.valid) continue;
#pragma unroll
        for (int i = 0; i < E; ++i) {
          u[i] = rstd * (u[i] - u_hat[i] * mean_dy_xhat);
          v[i] = rstd * (v[i] - v_hat[i] * mean_dy_xhat);
        }
        T* dx = a.dx + task.token * a.dx_token + (task.head + h) * a.dx_head;
        store_floats(dx + slot.first, u);
        store_floats(dx + slot.second, v);
      }
    }
    if (!a.with_weight) continue;
    __syncthreads();  // the ring is read no more
    auto* sums = reinterpret_cast<float*>(ring);
    if (slot.valid) {
      store_floats(sums + group.index() * a.d + slot.first, first_sum);
      store_floats(sums + group.index() * a.d + slot.second, second_sum);
    }
    write_partial(sums, tasks_per_block, a.d, a.partials.of(blockIdx.x, which));
  }
}

/// Element i of dout rotated back: the gradient of the norm's output. `head` points to dout.
template <class T>
__device__ __forceinline__ float rotated_back(const T* head, const Rotation& rotation, int64_t token, int i) {
  const int half = rotation.half;
  if (i >= 2 * half) return static_cast<float>(head[i]);
  const int pair = i < half ? i : i - half;
  float u[1] = {static_cast<float>(head[pair])}, v[1] = {static_cast<float>(head[pair + half])}, cosine[1],
        sine[1];
  rotation.angles(token, pair, cosine, sine);
  rotate(u, v, cosine, sine);
  return i < half ? u[0] : v[0];
}

/// The partial sums alone. blockIdx.y numbers blocks of columns, blockIdx.z is 0 for q and 1 for k.
template <class T>
__global__ void __launch_bounds__(backward_threads)
    qk_columns_kernel(QkBackwardArguments<T> a, HeadTasks<1> tasks) {
  const int which = static_cast<int>(blockIdx.z);
  const int i = static_cast<int>(blockIdx.y * backward_threads + threadIdx.x);
  if (i >= a.d) return;
  const int64_t task_count = which == 0 ? tasks.q_tasks : tasks.k_tasks;
  float sum = 0;
  for (int64_t n = task_count * blockIdx.x / gridDim.x; n < task_count * (blockIdx.x + 1) / gridDim.x; ++n) {
    const HeadTask<1> task = which == 0 ? tasks.q(n) : tasks.k(n);
    const float rstd = a.rstd[tasks.statistic(a.tokens, task.token, task.head)];
    const auto x = static_cast<float>(a.x[task.token * a.x_token + task.head * a.x_head + i]);
    const T* dout = a.dx + task.token * a.dx_token + task.head * a.dx_head;
    sum += rotated_back(dout, a.rotation, task.token, i) * (x * rstd);
  }
  a.partials.of(blockIdx.x, which)[i] = sum;
}

/// dx alone.
template <class T>
__global__ void __launch_bounds__(backward_threads)
    qk_backward_any_kernel(QkBackwardArguments<T> a, HeadTasks<1> tasks) {
  constexpr int tasks_per_block = backward_threads / kernel::warp;
  RowGroup group(kernel::warp);
  const int half = a.rotation.half;
  const int64_t task_count = tasks.q_tasks + tasks.k_tasks;
  for (int64_t number = static_cast<int64_t>(blockIdx.x) * tasks_per_block + group.index();
       number < task_count; number += static_cast<int64_t>(gridDim.x) * tasks_per_block) {
    const HeadTask<1> task = number < tasks.q_tasks ? tasks.q(number) : tasks.k(number - tasks.q_tasks);
    const T* x = a.x + task.token * a.x_token + task.head * a.x_head;
    T* dx = a.dx + task.token * a.dx_token + task.head * a.dx_head;
    const FloatVector<T>& weight = task.head < tasks.heads ? a.q_weight : a.k_weight;
    const float rstd = a.rstd[tasks.statistic(a.tokens, task.token, task.head)];
    auto weight_at = [&](int i) {
      float w[1];
      weight.get(i, w);
      return w[0];
    };
    float sum_dy_xhat = 0;
    for (int i = group.lane(); i < a.d; i += kernel::warp) {
      sum_dy_xhat +=
          rotated_back(dx, a.rotation, task.token, i) * weight_at(i) * (static_cast<float>(x[i]) * rstd);
    }
    const float mean_dy_xhat = group.sum(sum_dy_xhat) * a.inverse_d;
    __syncwarp();  // other lanes have read what this one overwrites
    auto gradient = [&](float dy, int i) {
      return T(rstd * (dy * weight_at(i) - static_cast<float>(x[i]) * rstd * mean_dy_xhat));
    };
    // A thread reads both elements of its pairs before it writes them.
    for (int i = group.lane(); i < half; i += kernel::warp) {
      const float u = rotated_back(dx, a.rotation, task.token, i),
                  v = rotated_back(dx, a.rotation, task.token, half + i);
      dx[i] = gradient(u, i);
      dx[half + i] = gradient(v, half + i);
    }
    for (int i = 2 * half + group.lane(); i < a.d; i += kernel::warp)
      dx[i] = gradient(static_cast<float>(dx[i]), i);
  }
}

template <class T>
void backward(Exec& exec, const QkNormRopeBackward& b) {
  const int64_t q = b.heads, k = b.dx.dim(1) - b.heads;
  QkBackwardArguments<T> a{};
  a.x = static_cast<const T*>(b.x.data);
  a.dx = static_cast<T*>(b.dx.data);
  a.x_token = b.x.step(0), a.x_head = b.x.step(1);
  a.dx_token = b.dx.step(0), a.dx_head = b.dx.step(1);
  a.tokens = b.dx.dim(0);
  a.d = static_cast<int>(b.dx.dim(2));
  a.inverse_d = 1.0f / static_cast<float>(a.d);
  a.q_weight = FloatVector<T>(b.q_weight, b.weight_offset);
  a.k_weight = FloatVector<T>(b.k_weight, b.weight_offset);
  a.rstd = static_cast<const float*>(b.rstd.data);
  a.rotation = Rotation(b.table, b.positions, true);
  auto *dq = static_cast<float*>(b.dq_weight.data), *dk = static_cast<float*>(b.dk_weight.data);
  a.with_weight = dq || dk;
  a.partials = {reinterpret_cast<float*>(exec.workspace.data), a.d};
  const bool packed = packed_heads(b.x, b.table) && packed_heads(b.dx, b.table) &&
                      kernel::aligned16(b.q_weight.data) && kernel::aligned16(b.k_weight.data);
  if (packed) {
    const HeadTasks<backward_heads> tasks(a.tokens, q, k);
    const int threads_per_head = power_of_two(a.d / (2 * per_pack<T>)),
              tasks_per_block = backward_threads / threads_per_head;
    const int64_t blocks =
        min(partial_blocks(exec, backward_resident), (tasks.q_tasks + tasks_per_block - 1) / tasks_per_block);
    constexpr size_t ring = 2 * 4 * backward_heads * backward_threads * sizeof(uint4);
    NRL_LAUNCH((qk_backward_kernel<T>), static_cast<unsigned>(blocks), backward_threads, ring, exec.stream, a,
               tasks, threads_per_head);
    if (a.with_weight) add_partials(exec, a.partials, static_cast<int>(blocks), dq, dk);
    return;
  }
  const HeadTasks<1> tasks(a.tokens, q, k);
  // The partial sums first: dx is dout.
  if (a.with_weight) {
    const int64_t blocks = min(partial_blocks(exec, 2), (tasks.q_tasks + 7) / 8);
    const auto column_blocks = static_cast<unsigned>((a.d + backward_threads - 1) / backward_threads);
    NRL_LAUNCH((qk_columns_kernel<T>), dim3(static_cast<unsigned>(blocks), column_blocks, 2),
               backward_threads, 0, exec.stream, a, tasks);
    add_partials(exec, a.partials, static_cast<int>(blocks), dq, dk);
  }
  const unsigned grid =
      kernel::grid_for(tasks.q_tasks + tasks.k_tasks, backward_threads / kernel::warp, exec.multiprocessors);
  NRL_LAUNCH((qk_backward_any_kernel<T>), grid, backward_threads, 0, exec.stream, a, tasks);
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
