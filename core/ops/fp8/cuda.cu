// fp8 with a scale per block on the GPU; formulas in core/ops/fp8.h.
//
// encode_kernel: a warp per block of 128 numbers, 4 per lane; writes (=) out and error. decode_kernel: a warp
// per block, 4 numbers per lane, the parts in order; writes (=) out.

#include "core/device/kernel.h"
#include "core/ops/fp8.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/fp8.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int threads = 256, warps = threads / warp;
constexpr int per_lane = static_cast<int>(fp8_block) / warp;

struct Shape {
  int64_t rows, width, blocks, bytes;
};

template <DType format>
__global__ void __launch_bounds__(threads)
    encode_kernel(const float* __restrict__ x, float* __restrict__ error, unsigned char* __restrict__ out,
                  Shape s) {
  const int lane = static_cast<int>(threadIdx.x) % warp;
  const int64_t all = s.rows * s.blocks;
  for (int64_t b = int64_t{blockIdx.x} * warps + threadIdx.x / warp; b < all;
       b += int64_t{gridDim.x} * warps) {
    const int64_t row = b / s.blocks, block = b % s.blocks, at = block * fp8_block;
    const int n = static_cast<int>(min(fp8_block, s.width - at));
    const int64_t first = row * s.width + at;
    unsigned char* to = out + row * s.bytes + at;
    float v[per_lane];
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < per_lane; ++k) {
      const int i = k * warp + lane;
      v[k] = i < n ? x[first + i] : 0.0f;
      if (error && i < n) v[k] += error[first + i];
      largest = max(largest, __builtin_bit_cast(unsigned, v[k]) & fp8::magnitude_bits);
    }
#pragma unroll
    for (int o = warp / 2; o; o >>= 1) largest = max(largest, __shfl_xor_sync(all_lanes, largest, o));
    const unsigned byte = fp8::scale_of<format>(largest);
    if (lane == 0) out[row * s.bytes + s.width + block] = static_cast<unsigned char>(byte);
    const float inverse = fp8::inverse_scale(byte), factor = fp8::scale_value(byte);
#pragma unroll
    for (int k = 0; k < per_lane; ++k) {
      const int i = k * warp + lane;
      if (i >= n) continue;
      const unsigned code = byte == fp8::bad_scale ? 0u : fp8::encode<format>(v[k] * inverse);
      to[i] = static_cast<unsigned char>(code);
      if (error && byte != fp8::bad_scale) error[first + i] = v[k] - fp8::decode<format>(code) * factor;
    }
  }
}

template <DType format>
__global__ void __launch_bounds__(threads)
    decode_kernel(const unsigned char* __restrict__ x, float* __restrict__ out, int64_t parts, Shape s) {
  const int lane = static_cast<int>(threadIdx.x) % warp;
  const int64_t all = s.rows * s.blocks;
  for (int64_t b = int64_t{blockIdx.x} * warps + threadIdx.x / warp; b < all;
       b += int64_t{gridDim.x} * warps) {
    const int64_t group = b / s.blocks, block = b % s.blocks, at = block * fp8_block;
    const int n = static_cast<int>(min(fp8_block, s.width - at));
    float sum[per_lane] = {};
    for (int64_t p = 0; p < parts; ++p) {
      const unsigned char* row = x + (group * parts + p) * s.bytes;
      const float factor = fp8::scale_value(row[s.width + block]);
#pragma unroll
      for (int k = 0; k < per_lane; ++k) {
        const int i = k * warp + lane;
        if (i < n) sum[k] += fp8::decode<format>(row[at + i]) * factor;
      }
    }
#pragma unroll
    for (int k = 0; k < per_lane; ++k)
      if (k * warp + lane < n) out[group * s.width + at + k * warp + lane] = sum[k];
  }
}

template <DType format>
void encode_as(Exec& exec, const Fp8Encode& a) {
  const int64_t width = a.x.dim(1);
  const Shape s{a.x.dim(0), width, (width + fp8_block - 1) / fp8_block, a.out.dim(1)};
  NRL_LAUNCH((encode_kernel<format>), grid_for(s.rows * s.blocks, warps, exec.multiprocessors), threads, 0,
             exec.stream, static_cast<const float*>(a.x.data), static_cast<float*>(a.error.data),
             static_cast<unsigned char*>(a.out.data), s);
}

template <DType format>
void decode_as(Exec& exec, const Fp8Decode& a) {
  const int64_t width = a.out.dim(1);
  const Shape s{a.out.dim(0), width, (width + fp8_block - 1) / fp8_block, a.x.dim(1)};
  NRL_LAUNCH((decode_kernel<format>), grid_for(s.rows * s.blocks, warps, exec.multiprocessors), threads, 0,
             exec.stream, static_cast<const unsigned char*>(a.x.data), static_cast<float*>(a.out.data),
             a.x.dim(0) / s.rows, s);
}

void encode_launch(Exec& exec, const Fp8Encode& a) {
  a.format == DType::e4m3 ? encode_as<DType::e4m3>(exec, a) : encode_as<DType::e5m2>(exec, a);
}

void decode_launch(Exec& exec, const Fp8Decode& a) {
  a.format == DType::e4m3 ? decode_as<DType::e4m3>(exec, a) : decode_as<DType::e5m2>(exec, a);
}

}  // namespace

void fill_fp8(KernelTable& table) {
  table.fp8_encode = encode_launch;
  table.fp8_decode = decode_launch;
}

}  // namespace nrl::ops::NRL_GPU
