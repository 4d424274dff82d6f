// Vertical-slash attention, gradients, for sm_90a: bfloat16, 128 dims, from the implicit index.
//
// A block is one producer warp and two warpgroups of 64 keys each; query blocks pass through shared memory: see backward_ring.cuh.
#include "backward.cuh"
#include "backward_mainloop.cuh"
#include "backward_producer.cuh"

namespace ds_sparse_ring {

constexpr int kBackwardThreads = 3 * 128;
constexpr int kQueryProducerRegisters = 32, kQueryConsumerRegisters = 240;  // 128 * (32 + 2 * 240) of 65536
constexpr uint32_t kBackwardSharedBytes = BackwardMemory::bytes;

__global__ void __launch_bounds__(kBackwardThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];  // an address that the compiler knows takes no registers
  const BackwardMemory memory(raw);
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    if (memory.keys % 1024) __trap();
    memory.init();
    prefetch_map(&a.q), prefetch_map(&a.k), prefetch_map(&a.v), prefetch_map(&a.d_o), prefetch_map(&a.dq);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kQueryProducerRegisters>();
    if (threadIdx.x < 32) QueryProducer(a, memory).run();
  } else {
    take_registers<kQueryConsumerRegisters>();
    QueryConsumer(a, memory).run();
  }
}

namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

cudaError_t encode_function(EncodeTiled* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  *encode = reinterpret_cast<EncodeTiled>(function);
  return found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
}

// [heads, rows, 128], strides in elements; boxes of 64 rows of 128 bytes
bool encode_map(EncodeTiled encode, CUtensorMap* map, const void* data, bool wide, int64_t rows, int64_t heads, int64_t row_stride,
                int64_t head_stride) {
  const cuuint64_t size = wide ? 4 : 2, sizes[3] = {kHeadSize, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {row_stride * size, head_stride * size};
  const cuuint32_t box[3] = {wide ? 32u : 64u, 64, 1}, steps[3] = {1, 1, 1};
  return encode(map, wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

cudaError_t zero_queries(const BackwardProblem& p, cudaStream_t stream) {
  const size_t row = kHeadSize * sizeof(float), rows = size_t(p.q_blocks) * kBlock;
  if (p.dq_row == kHeadSize)
    return cudaMemset2DAsync(p.dq, p.dq_head * sizeof(float), 0, rows * row, p.heads, stream);
  for (int head = 0; head < p.heads; ++head)
    if (const cudaError_t error = cudaMemset2DAsync(p.dq + head * p.dq_head, p.dq_row * sizeof(float), 0, row, rows, stream))
      return error;
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_backward(const BackwardProblem& p, int multiprocessors, cudaStream_t stream) {
  const int64_t q_rows = int64_t{p.q_blocks} * kBlock, k_rows = int64_t{p.k_blocks} * kBlock;
  if (p.heads % p.kv_heads) return cudaErrorInvalidValue;
  EncodeTiled encode;
  cudaError_t error = encode_function(&encode);
  if (error != cudaSuccess) return error;
  BackwardArguments a;
  a.problem = p;
  bool encoded = encode_map(encode, &a.q, p.q, false, q_rows, p.heads, kHeadSize, p.q_head) &&
                 encode_map(encode, &a.d_o, p.d_o, false, q_rows, p.heads, kHeadSize, p.do_head) &&
                 encode_map(encode, &a.dq, p.dq, true, q_rows, p.heads, p.dq_row, p.dq_head) &&
                 encode_map(encode, &a.k, p.k, false, k_rows, p.kv_heads, kHeadSize, p.k_head) &&
                 encode_map(encode, &a.v, p.v, false, k_rows, p.kv_heads, kHeadSize, p.v_head);
  if (p.columns > 0) {
    encoded = encoded &&
              encode_map(encode, &a.column_k, p.column_k, false, p.columns, 1, kHeadSize, p.columns * kHeadSize) &&
              encode_map(encode, &a.column_v, p.column_v, false, p.columns, 1, kHeadSize, p.columns * kHeadSize);
  } else {
    a.column_k = a.k, a.column_v = a.v;
    a.problem.column_tiles = 0;
  }
  if (!encoded) return cudaErrorInvalidValue;
  error = cudaMemsetAsync(p.next_tile, 0, 2 * sizeof(int32_t), stream);
  if (error == cudaSuccess && p.overwrite_dq) error = zero_queries(p, stream);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBackwardSharedBytes);
  if (error != cudaSuccess) return error;
  const int tiles = key_tiles(a.problem), blocks = tiles < multiprocessors ? tiles : multiprocessors;
  backward_kernel<<<blocks, kBackwardThreads, kBackwardSharedBytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace ds_sparse_ring
