// Sampling on the GPU; formulas in core/ops/sample.h.
//
// sample_kernel  a block per row; writes out (=). A thread has every 256th group of 4 tokens, for which it
// draws
//                one block of random numbers; maximum and sum by online softmax.
// join_kernel    a thread per row; writes token and log_prob (=)

#include "core/base/philox.h"
#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/sample/join.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int sample_threads = 256, join_threads = 128;

/// -log(-log(u)), u = (bits + 1/2) 2^-32. Near 1 from 1 - u, which f32 has exactly enough.
__device__ __forceinline__ float gumbel(uint32_t bits) {
  const auto unit = [](uint32_t x) {
    return static_cast<float>(x >> 16) * 0x1p-16f + (static_cast<float>(x & 0xffffu) + 0.5f) * 0x1p-32f;
  };
  const float c = unit(~bits);
  return -logf(-(c < 0.25f ? log1pf(-c) : logf(unit(bits))));
}

struct SampleArguments {
  const float *logits, *temperature;
  const int64_t *seed, *sample;
  const int* position;
  float* out;
  int64_t step;
  int columns, first_column, tokens;
};

/// The best token of some of a row's, and their sums.
struct Best {
  float score = -INFINITY, value = 0, largest = -INFINITY, sum = 0;
  int token = -1;

  __device__ __forceinline__ void take(float other, int other_token, float other_value) {
    if (other_token < 0 || (token >= 0 && (other < score || (other == score && other_token > token)))) return;
    score = other, token = other_token, value = other_value;
  }
  __device__ __forceinline__ void add(float most, float part) {
    const float m = fmaxf(largest, most);
    if (m == -INFINITY) return;
    sum = sum * expf(largest - m) + part * expf(most - m);
    largest = m;
  }
};

__global__ void __launch_bounds__(sample_threads) sample_kernel(SampleArguments a) {
  constexpr int warps = sample_threads / warp;
  NRL_SHARED(float, parts, [warps][4]);  // score, value, largest, sum
  NRL_SHARED(int, tokens, [warps]);
  const int64_t row = blockIdx.x;
  const int t = static_cast<int>(threadIdx.x), lane = t % warp;
  const float* const logits = a.logits + row * a.step;
  const bool greedy = a.temperature[row] == 0.0f;
  const float factor = greedy ? 1.0f : 1.0f / a.temperature[row];
  const auto position = static_cast<uint64_t>(a.position[row]) << 32;
  const int end = a.first_column + a.columns;
  Best best;
  for (int group = a.first_column / 4 + t; 4 * group < end; group += sample_threads) {
    PhiloxBlock words{};
    if (!greedy)
      words = philox4x32(static_cast<uint64_t>(a.sample[row]), position | static_cast<uint64_t>(group),
                         static_cast<uint64_t>(a.seed[row]));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 4 * group + i;
      if (token < a.first_column || token >= end) continue;
      const float z = logits[token - a.first_column] * factor;
      best.add(z, 1.0f);
      const float score = greedy ? z : z + gumbel(words[i]);
      if (token < a.tokens && score > -INFINITY) best.take(score, token, z);
    }
  }
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) {
    const float score = __shfl_xor_sync(all_lanes, best.score, o),
                value = __shfl_xor_sync(all_lanes, best.value, o),
                largest = __shfl_xor_sync(all_lanes, best.largest, o),
                sum = __shfl_xor_sync(all_lanes, best.sum, o);
    const int token = __shfl_xor_sync(all_lanes, best.token, o);
    best.take(score, token, value);
    best.add(largest, sum);
  }
  if (lane == 0) {
    float* const part = parts[t / warp];
    part[0] = best.score, part[1] = best.value, part[2] = best.largest, part[3] = best.sum;
    tokens[t / warp] = best.token;
  }
  __syncthreads();
  if (t != 0) return;
  for (int w = 1; w < warps; ++w) {
    best.take(parts[w][0], tokens[w], parts[w][1]);
    best.add(parts[w][2], parts[w][3]);
  }
  float* const out = a.out + row * SamplePart::columns;
  out[SamplePart::score] = best.score;
  out[SamplePart::token] = static_cast<float>(best.token);
  out[SamplePart::largest] = best.largest;
  out[SamplePart::sum] = best.sum;
  out[SamplePart::value] = best.value;
}

__global__ void __launch_bounds__(join_threads)
    join_kernel(const float* __restrict__ parts, int64_t slices, int64_t rows, int* token, float* log_prob) {
  const int64_t row = int64_t{blockIdx.x} * join_threads + threadIdx.x;
  if (row >= rows) return;
  const sample::Joined joined = sample::join(parts, slices, rows, row);
  token[row] = joined.token;
  log_prob[row] = joined.log_prob;
}

void sample_tokens_launch(Exec& exec, const SampleTokens& a) {
  NRL_LAUNCH(sample_kernel, static_cast<unsigned>(a.logits.dim(0)), sample_threads, 0, exec.stream,
             SampleArguments{.logits = static_cast<const float*>(a.logits.data),
                             .temperature = static_cast<const float*>(a.temperature.data),
                             .seed = static_cast<const int64_t*>(a.seed.data),
                             .sample = static_cast<const int64_t*>(a.sample.data),
                             .position = static_cast<const int*>(a.position.data),
                             .out = static_cast<float*>(a.out.data),
                             .step = a.logits.step(0),
                             .columns = static_cast<int>(a.logits.dim(1)),
                             .first_column = static_cast<int>(a.first_column),
                             .tokens = static_cast<int>(a.tokens)});
}

void join_samples_launch(Exec& exec, const JoinSamples& a) {
  NRL_LAUNCH(join_kernel, blocks_for(a.parts.dim(1), join_threads), join_threads, 0, exec.stream,
             static_cast<const float*>(a.parts.data), a.parts.dim(0), a.parts.dim(1),
             static_cast<int*>(a.token.data), static_cast<float*>(a.log_prob.data));
}

}  // namespace

void fill_sample(KernelTable& table) {
  table.sample_tokens = sample_tokens_launch;
  table.join_samples = join_samples_launch;
}

}  // namespace nrl::ops::NRL_GPU
