// fp8 with a scale per block on the CPU; formulas in core/ops/fp8.h. Blocks are split over the threads.

#include "core/device/cpu/parallel.h"
#include "core/ops/fp8.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_blocks = 128;

template <class Body>
void for_format(DType format, const Body& body) {
  if (format == DType::e4m3)
    body.template operator()<DType::e4m3>();
  else
    body.template operator()<DType::e5m2>();
}

template <DType format>
void encode_block(const float* x, float* error, uint8_t* out, uint8_t* scale, int64_t n) {
  float v[fp8_block];
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    v[i] = error ? x[i] + error[i] : x[i];
    largest = std::max(largest, __builtin_bit_cast(uint32_t, v[i]) & fp8::magnitude_bits);
  }
  const uint32_t byte = fp8::scale_of<format>(largest);
  *scale = static_cast<uint8_t>(byte);
  if (byte == fp8::bad_scale) {
    std::memset(out, 0, static_cast<size_t>(n));
    return;
  }
  const float inverse = fp8::inverse_scale(byte), factor = fp8::scale_value(byte);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = fp8::encode<format>(v[i] * inverse);
    out[i] = static_cast<uint8_t>(code);
    v[i] -= fp8::decode<format>(code) * factor;
  }
  if (error) std::memcpy(error, v, static_cast<size_t>(n) * sizeof(float));
}

void encode_kernel(Exec& exec, const Fp8Encode& a) {
  const int64_t width = a.x.dim(1), blocks = (width + fp8_block - 1) / fp8_block, bytes = a.out.dim(1);
  for_format(a.format, [&]<DType format>() {
    cpu::parallel_for(exec.threads, a.x.dim(0) * blocks, grain_blocks, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / blocks, block = i % blocks, at = block * fp8_block;
        uint8_t* out = data_of<uint8_t>(a.out) + row * bytes;
        encode_block<format>(data_of<const float>(a.x) + row * width + at,
                             a.error ? data_of<float>(a.error) + row * width + at : nullptr, out + at,
                             out + width + block, std::min(fp8_block, width - at));
      }
    });
  });
}

template <DType format>
void decode_block(const Fp8Decode& a, int64_t group, int64_t block) {
  const int64_t width = a.out.dim(1), bytes = a.x.dim(1), parts = a.x.dim(0) / a.out.dim(0);
  const int64_t at = block * fp8_block, n = std::min(fp8_block, width - at);
  float* out = data_of<float>(a.out) + group * width + at;
  float sum[fp8_block] = {};
  for (int64_t p = 0; p < parts; ++p) {
    const uint8_t* row = data_of<const uint8_t>(a.x) + (group * parts + p) * bytes;
    const float factor = fp8::scale_value(row[width + block]);
    const uint8_t* codes = row + at;
    if (p == 0) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sum[i] = fp8::decode<format>(codes[i]) * factor;
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sum[i] += fp8::decode<format>(codes[i]) * factor;
    }
  }
  std::memcpy(out, sum, static_cast<size_t>(n) * sizeof(float));
}

void decode_kernel(Exec& exec, const Fp8Decode& a) {
  const int64_t blocks = (a.out.dim(1) + fp8_block - 1) / fp8_block;
  for_format(a.format, [&]<DType format>() {
    cpu::parallel_for(exec.threads, a.out.dim(0) * blocks, grain_blocks, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) decode_block<format>(a, i / blocks, i % blocks);
    });
  });
}

}  // namespace

void fill_fp8(KernelTable& table) {
  table.fp8_encode = encode_kernel;
  table.fp8_decode = decode_kernel;
}

}  // namespace nrl::ops::NRL_ISA
