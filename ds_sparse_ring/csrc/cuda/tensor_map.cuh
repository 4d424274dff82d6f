// Maps for the copy engine, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "element.cuh"

namespace ds_sparse_ring {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

struct Encoder {
  cudaError_t error;
  EncodeTiled encode;
};

inline Encoder find_encoder() {  // without linking the driver's library
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return {error, nullptr};
  return {found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound, reinterpret_cast<EncodeTiled>(function)};
}

inline CUtensorMapDataType map_type(Element element) {
  return element == kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// [heads, rows, dims]; boxes of 64 rows of 128 bytes
inline bool encode_map(EncodeTiled encode, CUtensorMap* map, CUtensorMapDataType type, int dims, const void* data, int64_t rows,
                       int64_t row_stride, int64_t heads, int64_t head_stride) {
  const cuuint64_t size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(dims), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {row_stride * size, head_stride * size};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / size), 64, 1}, steps[3] = {1, 1, 1};
  return encode(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace ds_sparse_ring
