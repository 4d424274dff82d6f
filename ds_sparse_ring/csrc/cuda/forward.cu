// Vertical-slash attention, forward: maps for the copy engine, and which kernel does it.
#include "forward.cuh"
#include "tile_scheduler.cuh"

namespace ds_sparse_ring {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

struct Encoder {
  cudaError_t error;
  EncodeTiled encode;
};

Encoder find_encoder() {  // without linking the driver's library
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return {error, nullptr};
  return {found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound, reinterpret_cast<EncodeTiled>(function)};
}

// [heads, rows, dims]; boxes of 64 rows x 64 dims
bool encode_map(EncodeTiled encode, CUtensorMap* map, const ForwardProblem& p, const void* data, int64_t rows,
                int64_t row_stride, int64_t heads, int64_t head_stride) {
  const auto type = p.element == kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(p.head_size), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2, static_cast<cuuint64_t>(head_stride) * 2};
  const cuuint32_t box[3] = {64, 64, 1}, steps[3] = {1, 1, 1};
  return encode(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

cudaError_t launch_forward(const ForwardProblem& p, int multiprocessors, cudaStream_t stream) {
  const int64_t q_rows = int64_t{p.q_blocks} * kBlock, k_rows = int64_t{p.k_blocks} * kBlock;
  if (p.heads % p.kv_heads || (p.pairing == kPairHeads && p.heads / p.kv_heads % kHalves)) return cudaErrorInvalidValue;
  static const Encoder encoder = find_encoder();
  if (encoder.error != cudaSuccess) return encoder.error;
  const EncodeTiled encode = encoder.encode;
  ForwardArguments a;
  a.problem = p;
  bool encoded = encode_map(encode, &a.q, p, p.q, q_rows, p.q_row, p.heads, p.q_head) &&
                 encode_map(encode, &a.k, p, p.k, k_rows, p.k_row, p.kv_heads, p.k_head) &&
                 encode_map(encode, &a.v, p, p.v, k_rows, p.v_row, p.kv_heads, p.v_head);
  if (p.columns > 0) {
    encoded = encoded &&
              encode_map(encode, &a.column_k, p, p.column_k, p.columns, p.column_k_row, 1, p.columns * p.column_k_row) &&
              encode_map(encode, &a.column_v, p, p.column_v, p.columns, p.column_v_row, 1, p.columns * p.column_v_row);
  } else {
    a.column_k = a.k, a.column_v = a.v;
    a.problem.tables.column_ptr = nullptr;
  }
  if (!encoded) return cudaErrorInvalidValue;
  const cudaError_t error = cudaMemsetAsync(p.next_tile, 0, sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  const int tiles = TileScheduler(p).tiles, blocks = tiles < multiprocessors ? tiles : multiprocessors;
  if (p.element == kBfloat16 && p.head_size == 128) return launch_forward<kBfloat16, 128>(a, blocks, stream);
  if (p.element == kBfloat16 && p.head_size == 64) return launch_forward<kBfloat16, 64>(a, blocks, stream);
  if (p.element == kFloat16 && p.head_size == 128) return launch_forward<kFloat16, 128>(a, blocks, stream);
  if (p.element == kFloat16 && p.head_size == 64) return launch_forward<kFloat16, 64>(a, blocks, stream);
  return cudaErrorInvalidValue;
}

}  // namespace ds_sparse_ring
