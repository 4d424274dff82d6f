// wgmma with both operands in shared memory, as boxes of 64 x 64.
#pragma once

#include "wgmma_instructions.cuh"

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

}  // namespace ds_sparse_ring
