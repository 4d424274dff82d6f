// Vertical-slash attention, forward, for sm_90a, from the implicit index: the kernel and its launch.
//
// A block is one producer warp and two warpgroups of 64 query rows each that share stages of keys and values: see ring.cuh.
// One file of each element type and head size includes this, so that they are compiled side by side.
#pragma once

#include "forward.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace ds_sparse_ring {

constexpr int kThreads = 3 * 128;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // 128 * (56 + 2 * 224) of 65536

template <Element kElement, int kHeadSize, Output kOutput>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ uint8_t memory[];
  const Ring<kHeadSize> ring(memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment);
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    ring.init();
    prefetch_map(&a.q), prefetch_map(&a.k), prefetch_map(&a.v), prefetch_map(&a.column_k), prefetch_map(&a.column_v);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < 32) Producer<kHeadSize>(a, ring).run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<kElement, kHeadSize>(a.problem, ring, warpgroup - 1).template run<kOutput>();
  }
}

template <Element kElement, int kHeadSize, Output kOutput>
cudaError_t launch_forward_kernel(const ForwardArguments& a, int blocks, cudaStream_t stream) {
  constexpr uint32_t shared_bytes = Ring<kHeadSize>::bytes + kAlignment;  // and room to align it
  const auto kernel = forward_kernel<kElement, kHeadSize, kOutput>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

template <Element kElement, int kHeadSize>
cudaError_t launch_forward(const ForwardArguments& a, int blocks, cudaStream_t stream) {
  switch (a.problem.output) {
    case kWriteElement:
      return launch_forward_kernel<kElement, kHeadSize, kWriteElement>(a, blocks, stream);
    case kWriteFloat:
      return launch_forward_kernel<kElement, kHeadSize, kWriteFloat>(a, blocks, stream);
    default:
      return launch_forward_kernel<kElement, kHeadSize, kMergeFloat>(a, blocks, stream);
  }
}

}  // namespace ds_sparse_ring
