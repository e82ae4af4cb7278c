#include "core/device/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

namespace nrl::device {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// Null with a driver older than CUDA 12.0.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                             cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess)
    return reinterpret_cast<Encode>(function);
  cudaGetLastError();  // or the next launch would be blamed for it
  return nullptr;
}

}  // namespace

bool encode_tensor_map(CUtensorMap& map, const void* data, int64_t matrices, int64_t rows, int64_t columns,
                       int64_t stride, int box_rows) {
  static const Encode encode = find_encode();
  if (!encode) return false;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {bytes(stride), bytes(stride * rows)};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  // TMA moves elements only, so the type of their 16 bits does not matter.
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

int registers_of(const void* kernel) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.numRegs;
  cudaGetLastError();
  return 0;
}

}  // namespace nrl::device
