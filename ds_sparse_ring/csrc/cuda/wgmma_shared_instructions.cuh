// wgmma with both operands in shared memory, as boxes of 64 x 64.
#pragma once

#include "wgmma_instructions.cuh"

namespace ds_sparse_ring {

// clang-format off
#define DS_SPARSE_RING_PRODUCT_SHARED(types, sum)                                                                    \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                                                        \
      "{%0, %1, %2, %3, %4, %5, %6, %7,"                                                                             \
      " %8, %9, %10, %11, %12, %13, %14, %15,"                                                                       \
      " %16, %17, %18, %19, %20, %21, %22, %23,"                                                                     \
      " %24, %25, %26, %27, %28, %29, %30, %31}, "                                                                   \
      "%32, %33, p, 1, 1, %35, %35;\n}\n"                                                                            \
      : sum(d[0]), sum(d[1]), sum(d[2]), sum(d[3]), sum(d[4]), sum(d[5]), sum(d[6]), sum(d[7]),                      \
        sum(d[8]), sum(d[9]), sum(d[10]), sum(d[11]), sum(d[12]), sum(d[13]), sum(d[14]), sum(d[15]),                \
        sum(d[16]), sum(d[17]), sum(d[18]), sum(d[19]), sum(d[20]), sum(d[21]), sum(d[22]), sum(d[23]),              \
        sum(d[24]), sum(d[25]), sum(d[26]), sum(d[27]), sum(d[28]), sum(d[29]), sum(d[30]), sum(d[31])               \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kAcross ? 1 : 0))
// clang-format on

// d [64, 64] (+)= a [64, 16] b [64, 16]^T. kAcross: both operands have the contraction across their rows, else along them
template <Element kElement, bool kAcross>
__device__ __forceinline__ void product_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (kElement == kBfloat16) {
    DS_SPARSE_RING_PRODUCT_SHARED("bf16.bf16", "+f");
  } else {
    DS_SPARSE_RING_PRODUCT_SHARED("f16.f16", "+f");
  }
}

// d = a b^T; what d was is not kept in registers until then
template <Element kElement, bool kAcross>
__device__ __forceinline__ void first_product_shared(float (&d)[32], uint64_t a, uint64_t b) {
  constexpr bool accumulate = false;
  if constexpr (kElement == kBfloat16) {
    DS_SPARSE_RING_PRODUCT_SHARED("bf16.bf16", "=f");
  } else {
    DS_SPARSE_RING_PRODUCT_SHARED("f16.f16", "=f");
  }
}

#undef DS_SPARSE_RING_PRODUCT_SHARED

}  // namespace ds_sparse_ring
