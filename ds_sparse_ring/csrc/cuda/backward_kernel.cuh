// Vertical-slash attention, gradients, for sm_90a, from the implicit index: the kernel and its launch.
//
// A block is one producer warp and two warpgroups of 64 keys each; query blocks pass through shared memory: see backward_ring.cuh.
// One file of each element type and head size includes this, so that they are compiled side by side.
#pragma once

#include "backward.cuh"
#include "backward_mainloop.cuh"
#include "backward_producer.cuh"

namespace ds_sparse_ring {

constexpr int kBackwardThreads = 3 * 128;
constexpr int kQueryProducerRegisters = 24, kQueryConsumerRegisters = 240;
// a launch gives 168 registers to each thread; who asks for more than others have given back waits for ever
static_assert(kQueryProducerRegisters + 2 * kQueryConsumerRegisters <= 3 * 168);

template <Element kElement, int kDims>
__global__ void __launch_bounds__(kBackwardThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];  // an address that the compiler knows takes no registers
  const BackwardMemory<kDims> memory(raw);
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    if (memory.keys % 1024) __trap();
    memory.init();
    prefetch_map(&a.q), prefetch_map(&a.k), prefetch_map(&a.v), prefetch_map(&a.d_o), prefetch_map(&a.dq);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kQueryProducerRegisters>();
    if (threadIdx.x < 32) QueryProducer<kDims>(a, memory).run();
  } else {
    take_registers<kQueryConsumerRegisters>();
    QueryConsumer<kElement, kDims>(a, memory).run();
  }
}

template <Element kElement, int kDims>
cudaError_t launch_backward(const BackwardArguments& a, int blocks, cudaStream_t stream) {
  constexpr uint32_t bytes = BackwardMemory<kDims>::bytes;
  const auto kernel = backward_kernel<kElement, kDims>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kBackwardThreads, bytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace ds_sparse_ring
