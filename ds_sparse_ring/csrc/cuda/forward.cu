// Vertical-slash attention, forward, for sm_90a: bfloat16, 128 dims, from the implicit index.
//
// A block is one producer warp and two warpgroups of 64 query rows each that share stages of keys and values: see ring.cuh.
#include "forward.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace ds_sparse_ring {

constexpr int kThreads = 3 * 128;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // 128 * (56 + 2 * 224) of 65536
constexpr uint32_t kSharedBytes = Ring::bytes + 1024;             // and room to align it

template <Output kOutput>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ uint8_t memory[];
  const Ring ring(memory + (1024 - shared_address(memory) % 1024) % 1024);
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    ring.init();
    prefetch_map(&a.q), prefetch_map(&a.k), prefetch_map(&a.v), prefetch_map(&a.column_k), prefetch_map(&a.column_v);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < 32) Producer(a, ring).run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer(a.problem, ring, warpgroup - 1).template run<kOutput>();
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

// [heads, rows, 128] bfloat16; boxes of 64 rows x 64 dims
bool encode_map(EncodeTiled encode, CUtensorMap* map, const void* data, int64_t rows, int64_t row_stride, int64_t heads,
                int64_t head_stride) {
  const cuuint64_t sizes[3] = {kHeadSize, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2, static_cast<cuuint64_t>(head_stride) * 2};
  const cuuint32_t box[3] = {64, 64, 1}, steps[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <Output kOutput>
cudaError_t launch(const ForwardArguments& a, int blocks, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(forward_kernel<kOutput>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  forward_kernel<kOutput><<<blocks, kThreads, kSharedBytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_forward(const ForwardProblem& p, int multiprocessors, cudaStream_t stream) {
  const int64_t q_rows = int64_t{p.q_blocks} * kBlock, k_rows = int64_t{p.k_blocks} * kBlock;
  if (p.heads % p.kv_heads || (p.pairing == kPairHeads && p.heads / p.kv_heads % kHalves)) return cudaErrorInvalidValue;
  EncodeTiled encode;
  cudaError_t error = encode_function(&encode);
  if (error != cudaSuccess) return error;
  ForwardArguments a;
  a.problem = p;
  bool encoded = encode_map(encode, &a.q, p.q, q_rows, p.q_row, p.heads, p.q_head) &&
                 encode_map(encode, &a.k, p.k, k_rows, p.k_row, p.kv_heads, p.k_head) &&
                 encode_map(encode, &a.v, p.v, k_rows, p.v_row, p.kv_heads, p.v_head);
  if (p.columns > 0) {
    encoded = encoded && encode_map(encode, &a.column_k, p.column_k, p.columns, p.column_k_row, 1, p.columns * p.column_k_row) &&
              encode_map(encode, &a.column_v, p.column_v, p.columns, p.column_v_row, 1, p.columns * p.column_v_row);
  } else {
    a.column_k = a.k, a.column_v = a.v;
    a.problem.tables.column_ptr = nullptr;
  }
  if (!encoded) return cudaErrorInvalidValue;
  error = cudaMemsetAsync(p.next_tile, 0, sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  const int tiles = TileScheduler(p).tiles, blocks = tiles < multiprocessors ? tiles : multiprocessors;
  switch (p.output) {
    case kWriteBf16:
      return launch<kWriteBf16>(a, blocks, stream);
    case kWriteFloat:
      return launch<kWriteFloat>(a, blocks, stream);
    default:
      return launch<kMergeFloat>(a, blocks, stream);
  }
}

}  // namespace ds_sparse_ring
