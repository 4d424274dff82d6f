// Online softmax of 64 rows over a warpgroup's scores, in base 2.
//
// Scores [64, 64] as wgmma leaves them: a thread has rows 16 * warp + lane / 4 (+ 8 for the second of its two) and, of every 8
// keys, 2 * (lane % 4) and the next one: s[4 j + 2 r + e] is row r of the thread, key 8 j + 2 (lane % 4) + e.
//
// The maximum that scores are taken relative to may lag: sums and outputs are rescaled only when some row has grown by more
// than `kSlack` powers of two. Weights then reach 2^kSlack instead of 1, which neither fp32 sums nor weights of 16 bits mind, and
// most steps exchange nothing between threads.
#pragma once

#include "ptx.cuh"
#include "wgmma.cuh"

namespace ds_sparse_ring {

constexpr float kLowest = -1.0e30f;  // stands for "no key yet": finite, so that no difference of maxima is NaN
constexpr float kSlack = 8.0f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// keys after a query of the same block do not count
__device__ __forceinline__ void mask_causal(float (&s)[32]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, key = 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * j + key + i % 2 > row + 8 * (i / 2)) s[4 * j + i] = minus_infinity();
}

// keys whose bit is 0 do not count
__device__ __forceinline__ void mask_keys(float (&s)[32], const uint32_t (&mask)[2]) {
  const int key = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t mine = mask[half] >> key;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!(mine & (1u << (8 * j + i % 2)))) s[16 * half + 4 * j + i] = minus_infinity();
  }
}

struct Softmax {
  float largest[2], total[2];  // of the thread's two rows: reference maximum, and this thread's part of the sum
  float factor[2];             // what earlier outputs are to be multiplied with, if `rescale`
  bool rescale;                // the same in all lanes of a warp

  __device__ __forceinline__ void begin() {
    largest[0] = largest[1] = kLowest;
    total[0] = total[1] = 0.0f;
  }

  // moves the reference maximum if these scores are far above it
  __device__ __forceinline__ void grow(const float (&s)[32], float scale) {
    float most[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
    for (int j = 1; j < 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) most[r] = fmaxf(most[r], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    const bool grown = most[0] * scale > largest[0] + kSlack || most[1] * scale > largest[1] + kSlack;
    rescale = __any_sync(0xFFFFFFFFu, grown);
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float seen = fmaxf(largest[r], quad_max(most[r]) * scale);
        factor[r] = exp2_fast(largest[r] - seen);
        total[r] *= factor[r];
        largest[r] = seen;
      }
    }
  }

  // scores -> weights, in place
  __device__ __forceinline__ void weigh(float (&s)[32], float scale) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float &a = s[4 * j + 2 * r], &b = s[4 * j + 2 * r + 1];
        a = exp2_fast(fmaf(a, scale, -largest[r]));
        b = exp2_fast(fmaf(b, scale, -largest[r]));
        total[r] += a + b;
      }
  }

  template <int kSums>
  __device__ __forceinline__ void rescale_output(float (&o)[kSums]) const {
    if (rescale) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[i] *= factor[i / 2 % 2];
    }
  }
};

// weights as the first operand of p v: step k has keys 16 k to 16 k + 15
template <Element kElement>
__device__ __forceinline__ void weights_to_operand(const float (&s)[32], uint32_t (&p)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) p[k][i] = pack<kElement>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

}  // namespace ds_sparse_ring
