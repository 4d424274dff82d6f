// The kernel that marks wanted keys, for sm_90a, and its launch: a block does one tile, one thread of its first warpgroup the copies,
// up to four other warpgroups 64 rows each.
//
// One file of each element type and head size includes this, so that they are compiled side by side.
#pragma once

#include "wanted_mainloop.cuh"

namespace ds_sparse_ring {

constexpr int kMostWantedThreads = (1 + kMostTileHeads) * 128;  // 96 registers each
constexpr int kWantedProducerRegisters = 24, kWantedConsumerRegisters = 112;  // 128 * (24 + 4 * 112) of 640 * 96

template <Element kElement, int kHeadSize>
__global__ void __launch_bounds__(kMostWantedThreads, 1) wanted_kernel(const __grid_constant__ WantedArguments a) {
  extern __shared__ uint8_t memory[];
  const WantedTile tile(a.problem, static_cast<int>(blockIdx.x));
  if (!tile.marks(a.problem)) return;
  const KeyRing<kHeadSize> ring(memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment);
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    ring.init(4 * a.problem.tile_heads);
    prefetch_map(&a.k);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kWantedProducerRegisters>();
    if (threadIdx.x == 0) copy_keys(a, tile, ring);
  } else {
    take_registers<kWantedConsumerRegisters>();
    WantedConsumer<kElement, kHeadSize>(a.problem, tile, ring).run(warpgroup - 1);
  }
}

template <Element kElement, int kHeadSize>
cudaError_t launch_wanted(const WantedArguments& a, cudaStream_t stream) {
  constexpr uint32_t shared_bytes = KeyRing<kHeadSize>::bytes + kAlignment;  // and room to align it
  static_assert(shared_bytes <= kMostSharedBytes);
  const auto kernel = wanted_kernel<kElement, kHeadSize>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const WantedProblem& p = a.problem;
  kernel<<<p.kv_heads * p.q_blocks * p.tiles, (1 + p.tile_heads) * 128, shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace ds_sparse_ring
