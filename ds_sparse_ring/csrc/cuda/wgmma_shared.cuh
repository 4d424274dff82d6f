// Matrix products of a warpgroup with both operands in shared memory, for the backward pass.
//
// The operands are boxes of 64 x 64 as in wgmma.cuh; each can be read with the contraction along its rows or across them.
#pragma once

#include "wgmma.cuh"
#include "wgmma_shared_instructions.cuh"

namespace ds_sparse_ring {

// d [64, 64] = a b^T over the dims of both tiles [64 tokens, kDims]
template <Element kElement, int kDims>
__device__ __forceinline__ void product_over_dims(float (&d)[32], uint32_t a_tile, uint32_t b_tile) {
  const uint64_t a = key_descriptor(a_tile), b = key_descriptor(b_tile);
  first_product_shared<kElement, false>(d, a, b);
#pragma unroll
  for (int step = 1; step < kDims / 16; ++step) product_shared<kElement, false>(d, a + key_step(step), b + key_step(step), true);
}

// d [64, 64] (+)= a^T b over 64 keys: both boxes [64 keys, 64]
template <Element kElement>
__device__ __forceinline__ void product_over_keys(float (&d)[32], uint32_t a_box, uint32_t b_box, bool accumulate) {
  const uint64_t a = value_descriptor(a_box), b = value_descriptor(b_box);
#pragma unroll
  for (int step = 0; step < 4; ++step)
    product_shared<kElement, true>(d, a + value_step(step), b + value_step(step), accumulate || step > 0);
}

}  // namespace ds_sparse_ring
