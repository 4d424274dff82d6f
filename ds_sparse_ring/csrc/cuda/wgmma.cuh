// Matrix products of a warpgroup (wgmma): A from registers, B from shared memory as the copy engine writes it, fp32 sums.
//
// A tile of 64 tokens by 128 dims stands in shared memory as two boxes of 64 x 64 (one for 64 dims), each 64 rows of 128 bytes,
// swizzled (SWIZZLE_128B: the 16-byte unit u of row r stands at u ^ (r % 8)). Both products read it as it is: q k^T has the
// contraction along the rows ("K-major"), p v across them ("MN-major").
#pragma once

#include "wgmma_instructions.cuh"

namespace ds_sparse_ring {

constexpr uint32_t kBoxBytes = 64 * 128;  // 64 tokens x 64 dims of 2 bytes

// ---- descriptors: address, leading and stride offsets in units of 16 bytes, swizzle of 128 bytes (bit 62)

__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{stride_bytes >> 4} << 32) | (uint64_t{leading_bytes >> 4} << 16) |
         ((address & 0x3FFFF) >> 4);
}

// keys as the transposed operand of q k^T: 8 keys take 1024 bytes; 16 dims further are 32 bytes further within a box
__device__ __forceinline__ uint64_t key_descriptor(uint32_t tile) { return descriptor(tile, 16, 1024); }
__host__ __device__ constexpr uint64_t key_step(int step) { return ((step / 4) * kBoxBytes + (step % 4) * 32) >> 4; }

// values as the operand of p v: the next 64 dims are a box further, the next 8 keys 1024 bytes; a step of 16 keys is 2048
__device__ __forceinline__ uint64_t value_descriptor(uint32_t tile) { return descriptor(tile, kBoxBytes, 1024); }
__host__ __device__ constexpr uint64_t value_step(int step) { return (step * 2048) >> 4; }

// ---- products of tiles

// scores [64, 64] = q k^T: q in registers (steps of 16 dims), k a tile in shared memory
template <Element kElement = kBfloat16, int kSteps>
__device__ __forceinline__ void score_product(float (&s)[32], const uint32_t (&q)[kSteps][4], uint32_t k_tile) {
  const uint64_t k = key_descriptor(k_tile);
  first_product_64x64<kElement>(s, q[0], k);
#pragma unroll
  for (int step = 1; step < kSteps; ++step) product_64x64<kElement>(s, q[step], k + key_step(step), true);
}

// o [64, dims] += p v: p in registers (4 steps of 16 keys), v a tile in shared memory; a thread has half as many sums as dims
template <Element kElement = kBfloat16, int kSums>
__device__ __forceinline__ void value_product(float (&o)[kSums], const uint32_t (&p)[4][4], uint32_t v_tile) {
  static_assert(kSums == 32 || kSums == 64);
  const uint64_t v = value_descriptor(v_tile);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (kSums == 64)
      product_64x128<kElement>(o, p[step], v + value_step(step), true);
    else
      product_64x64<kElement, true>(o, p[step], v + value_step(step), true);
  }
}

}  // namespace ds_sparse_ring
