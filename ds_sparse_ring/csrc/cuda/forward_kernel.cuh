// Vertical-slash attention, forward, for sm_90a, from the implicit index: the kernel and its launch.
//
// A block is one producer warp and two warpgroups of 64 query rows each that share stages of keys and values: see ring.cuh.
// One file of each element type and head size includes this, so that they are compiled side by side.
#pragma once

#include "forward.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace ds_sparse_ring {

// Two warpgroups that compute, then the warp that copies.
//
// At 64 dims a step's exponentials take as long as its products, and two warpgroups spend more time waiting for either than
// working: two blocks share a multiprocessor, and none of their four warpgroups overlaps anything by itself. At 128 dims the
// registers hold one block, and the copying warp has a warpgroup's threads, without which registers cannot be moved.
template <int kHeadSize>
struct Shape {
  static constexpr int threads = (kHalves + 1) * 128;
  static constexpr int producer_registers = 56, consumer_registers = 224;  // 128 * (56 + 2 * 224) of 65536
};

template <>
struct Shape<64> {
  static constexpr int threads = kHalves * 128 + 32;
  static constexpr int producer_registers = 0, consumer_registers = 0;  // as compiled: at most 96, of 20 warps' 65536
};

template <Element kElement, int kHeadSize, Output kOutput>
__global__ void __launch_bounds__(Shape<kHeadSize>::threads, Ring<kHeadSize>::blocks)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  using Shape = Shape<kHeadSize>;
  extern __shared__ __align__(kAlignment) uint8_t memory[];
  const Ring<kHeadSize> ring(memory);
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    if (shared_address(memory) % kAlignment != 0) __trap();  // swizzled copies would go elsewhere
    ring.init();
    prefetch_map(&a.q), prefetch_map(&a.k), prefetch_map(&a.v), prefetch_map(&a.column_k), prefetch_map(&a.column_v);
  }
  __syncthreads();
  if (warpgroup == kHalves) {
    if constexpr (Shape::producer_registers > 0) give_registers<Shape::producer_registers>();
    if (threadIdx.x < kHalves * 128 + 32) Producer<kHeadSize>(a, ring).run();
  } else {
    if constexpr (Shape::consumer_registers > 0) take_registers<Shape::consumer_registers>();
    Consumer<kElement, kHeadSize>(a.problem, ring, warpgroup).template run<kOutput>();
  }
}

template <Element kElement, int kHeadSize, Output kOutput>
cudaError_t launch_forward_kernel(const ForwardArguments& a, int multiprocessors, cudaStream_t stream) {
  constexpr uint32_t shared_bytes = Ring<kHeadSize>::bytes;
  const auto kernel = forward_kernel<kElement, kHeadSize, kOutput>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int tiles = TileScheduler(a.problem).tiles, blocks = Ring<kHeadSize>::blocks * multiprocessors;
  kernel<<<tiles < blocks ? tiles : blocks, Shape<kHeadSize>::threads, shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

template <Element kElement, int kHeadSize>
cudaError_t launch_forward(const ForwardArguments& a, int multiprocessors, cudaStream_t stream) {
  switch (a.problem.output) {
    case kWriteElement:
      return launch_forward_kernel<kElement, kHeadSize, kWriteElement>(a, multiprocessors, stream);
    case kWriteFloat:
      return launch_forward_kernel<kElement, kHeadSize, kWriteFloat>(a, multiprocessors, stream);
    default:
      return launch_forward_kernel<kElement, kHeadSize, kMergeFloat>(a, multiprocessors, stream);
  }
}

}  // namespace ds_sparse_ring
