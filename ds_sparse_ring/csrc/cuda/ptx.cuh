// Hopper's instructions that CUDA C++ has no name for: barriers in shared memory, the copy engine, register budgets.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "element.cuh"

namespace ds_sparse_ring {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- barriers (mbarrier): a phase ends when `arrivals` have come and all announced bytes have been copied

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_visible_to_copies() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

#ifdef DS_SPARSE_RING_HANG_NS
// For tests: a wait that lasts too long says where it stands, in memory that outlives the kernel, and ends the kernel.
__device__ uint32_t* hang_report;

__device__ __noinline__ void report_hang(uint32_t barrier, uint32_t parity, uint32_t what) {
  if (hang_report && atomicCAS_system(hang_report, 0u, 1u) == 0u) {
    const uint32_t values[5] = {blockIdx.x, threadIdx.x, barrier, parity, what};
    for (int i = 0; i < 5; ++i) reinterpret_cast<volatile uint32_t*>(hang_report)[i + 1] = values[i];
    __threadfence_system();
  }
  __trap();
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
#endif

// waits until the phase of this parity has ended; the phase before a barrier's first one has parity 1 and has ended.
// `what`: number of the stage, for a report.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity, uint32_t what) {
#ifdef DS_SPARSE_RING_HANG_NS
  if (barrier_try_wait(barrier, parity)) return;
  const uint64_t begin = nanoseconds();
  while (!barrier_try_wait(barrier, parity))
    if (nanoseconds() - begin > DS_SPARSE_RING_HANG_NS) report_hang(barrier, parity, what);
#else
  while (!barrier_try_wait(barrier, parity)) {
  }
#endif
}

// ---- the copy engine: one box of a tensor [heads, rows, head size] into shared memory

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t into, const CUtensorMap* map, uint32_t barrier, int dim, int row, int head) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(into),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(dim), "r"(row), "r"(head)
      : "memory");
}

// what this thread has read or written is done before the copy engine or the matrix units touch it
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---- registers of a warpgroup: given back by those that copy, taken by those that compute

template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- arithmetic

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// two floats as two bfloat16, `low` in the lower half
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// the same in a type of queries
template <Element kElement>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (kElement == kBfloat16) {
    return pack_bf16(low, high);
  } else {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
}

}  // namespace ds_sparse_ring
