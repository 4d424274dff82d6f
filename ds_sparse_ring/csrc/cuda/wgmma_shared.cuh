// Matrix products of a warpgroup with both operands in shared memory, for the backward pass.
//
// The operands are boxes of 64 x 64 as in wgmma.cuh; each can be read with the contraction along its rows or across them.
#pragma once

#include "wgmma.cuh"

namespace ds_sparse_ring {

// clang-format off
#define DS_SPARSE_RING_PRODUCT_SHARED(types)                                                                         \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                                                        \
      "{%0, %1, %2, %3, %4, %5, %6, %7,"                                                                             \
      " %8, %9, %10, %11, %12, %13, %14, %15,"                                                                       \
      " %16, %17, %18, %19, %20, %21, %22, %23,"                                                                     \
      " %24, %25, %26, %27, %28, %29, %30, %31}, "                                                                   \
      "%32, %33, p, 1, 1, %35, %35;\n}\n"                                                                            \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])       \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kAcross ? 1 : 0))
// clang-format on

// d [64, 64] (+)= a [64, 16] b [64, 16]^T. kAcross: both operands have the contraction across their rows, else along them
template <Element kElement, bool kAcross>
__device__ __forceinline__ void product_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (kElement == kBfloat16) {
    DS_SPARSE_RING_PRODUCT_SHARED("bf16.bf16");
  } else {
    DS_SPARSE_RING_PRODUCT_SHARED("f16.f16");
  }
}

#undef DS_SPARSE_RING_PRODUCT_SHARED

// d [64, 64] = a b^T over the dims of both tiles [64 tokens, kDims]
template <Element kElement, int kDims>
__device__ __forceinline__ void product_over_dims(float (&d)[32], uint32_t a_tile, uint32_t b_tile) {
  const uint64_t a = key_descriptor(a_tile), b = key_descriptor(b_tile);
#pragma unroll
  for (int step = 0; step < kDims / 16; ++step) product_shared<kElement, false>(d, a + key_step(step), b + key_step(step), step > 0);
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
