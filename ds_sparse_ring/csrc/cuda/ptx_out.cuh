// Hopper's instructions by which results leave registers and shared memory: stores of fragments, additions to global memory by
// the copy engine, and barriers among a few warps.
#pragma once

#include "ptx.cuh"

namespace ds_sparse_ring {

// threadIdx.x, read anew: what is computed from it takes no registers elsewhere
__device__ __forceinline__ uint32_t thread_now() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// the same value in all lanes, as the compiler then knows
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

// waits for the other warps of barrier `id` (1 to 15), `threads` in all
__device__ __forceinline__ void sync_warps(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// one of the other warps of a sync_warps, which does not wait itself
__device__ __forceinline__ void arrive_warps(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_word(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_float(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// the inverse of load_matrices
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

// `bytes` (a multiple of 16) from global memory into shared memory
__device__ __forceinline__ void copy_bytes(uint32_t into, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(into),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// adds two floats to 8 bytes of global memory
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "f"(x), "f"(y) : "memory");
}

// adds a box in shared memory to a tensor [heads, rows, head size]; complete once `added` says so
__device__ __forceinline__ void add_box(const CUtensorMap* map, uint32_t from, int dim, int row, int head) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(from), "r"(dim), "r"(row), "r"(head)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// what this thread has given to add_box may be overwritten
__device__ __forceinline__ void wait_added_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// ... and stands in global memory
__device__ __forceinline__ void wait_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace ds_sparse_ring
