// wgmma itself: its order, and its products with A from registers.
#pragma once

#include "ptx.cuh"

namespace ds_sparse_ring {

// ---- order

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// at most `Pending` of the committed groups are still running
template <int Pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// the compiler must not move what reads or writes these registers across this point
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(uint32_t (&r)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(r[i][j])::"memory");
}

// ---- products: a from registers; b from shared memory, with the contraction along its rows or across them

// clang-format off
#define DS_SPARSE_RING_PRODUCT_64X64(types, sum)                                                                         \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                                                        \
      "{%0, %1, %2, %3, %4, %5, %6, %7,"                                                                             \
      " %8, %9, %10, %11, %12, %13, %14, %15,"                                                                       \
      " %16, %17, %18, %19, %20, %21, %22, %23,"                                                                     \
      " %24, %25, %26, %27, %28, %29, %30, %31}, "                                                                   \
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                                                \
      : sum(d[0]), sum(d[1]), sum(d[2]), sum(d[3]), sum(d[4]), sum(d[5]), sum(d[6]), sum(d[7]),                      \
        sum(d[8]), sum(d[9]), sum(d[10]), sum(d[11]), sum(d[12]), sum(d[13]), sum(d[14]), sum(d[15]),                \
        sum(d[16]), sum(d[17]), sum(d[18]), sum(d[19]), sum(d[20]), sum(d[21]), sum(d[22]), sum(d[23]),              \
        sum(d[24]), sum(d[25]), sum(d[26]), sum(d[27]), sum(d[28]), sum(d[29]), sum(d[30]), sum(d[31])               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kAcross ? 1 : 0))

#define DS_SPARSE_RING_PRODUCT_64X128(types)                                                                         \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " "                                                       \
      "{%0, %1, %2, %3, %4, %5, %6, %7,"                                                                             \
      " %8, %9, %10, %11, %12, %13, %14, %15,"                                                                       \
      " %16, %17, %18, %19, %20, %21, %22, %23,"                                                                     \
      " %24, %25, %26, %27, %28, %29, %30, %31,"                                                                     \
      " %32, %33, %34, %35, %36, %37, %38, %39,"                                                                     \
      " %40, %41, %42, %43, %44, %45, %46, %47,"                                                                     \
      " %48, %49, %50, %51, %52, %53, %54, %55,"                                                                     \
      " %56, %57, %58, %59, %60, %61, %62, %63}, "                                                                   \
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                                                \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kAcross ? 1 : 0))
// clang-format on

// d [64, 64] (+)= a [64, 16] b: [64, 16]^T, or [16, 64] if kAcross
template <Element kElement = kBfloat16, bool kAcross = false>
__device__ __forceinline__ void product_64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  if constexpr (kElement == kBfloat16) {
    DS_SPARSE_RING_PRODUCT_64X64("bf16.bf16", "+f");
  } else {
    DS_SPARSE_RING_PRODUCT_64X64("f16.f16", "+f");
  }
}

// d [64, 64] = a [64, 16] b [64, 16]^T; what d was is not kept in registers until then
template <Element kElement>
__device__ __forceinline__ void first_product_64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  constexpr bool accumulate = false, kAcross = false;
  if constexpr (kElement == kBfloat16) {
    DS_SPARSE_RING_PRODUCT_64X64("bf16.bf16", "=f");
  } else {
    DS_SPARSE_RING_PRODUCT_64X64("f16.f16", "=f");
  }
}

// d [64, 128] (+)= a [64, 16] b [16, 128]
template <Element kElement = kBfloat16, bool kAcross = true>
__device__ __forceinline__ void product_64x128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  if constexpr (kElement == kBfloat16) {
    DS_SPARSE_RING_PRODUCT_64X128("bf16.bf16");
  } else {
    DS_SPARSE_RING_PRODUCT_64X128("f16.f16");
  }
}

#undef DS_SPARSE_RING_PRODUCT_64X64
#undef DS_SPARSE_RING_PRODUCT_64X128

}  // namespace ds_sparse_ring
