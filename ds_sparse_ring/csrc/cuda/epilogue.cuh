// From a warpgroup's sums to o and lse: written, or merged with what is there. Rows without a key have o = 0, lse = -inf and
// change nothing.
#pragma once

#include "problem.cuh"
#include "softmax.cuh"
#include "tile_scheduler.cuh"

namespace ds_sparse_ring {

// a thread's part of a row: dims 8 j + 2 (lane % 4) and the next one, o[4 j + 2 r] and o[4 j + 2 r + 1]
template <Element kElement, Output kOutput, int kSums>
__device__ __forceinline__ void write_row(const ForwardProblem& p, int head, int64_t row, const float (&o)[kSums], int r,
                                          float factor, float old_factor) {
  const int64_t at = head * p.o_head + row * p.o_row + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    float x = o[4 * j + 2 * r] * factor, y = o[4 * j + 2 * r + 1] * factor;
    if constexpr (kOutput == kWriteElement) {
      reinterpret_cast<uint32_t*>(p.o)[(at + 8 * j) / 2] = pack<kElement>(x, y);
    } else {
      float2* out = reinterpret_cast<float2*>(static_cast<float*>(p.o) + at + 8 * j);
      if constexpr (kOutput == kMergeFloat) {
        const float2 old = *out;
        x += old.x * old_factor, y += old.y * old_factor;
      }
      *out = make_float2(x, y);
    }
  }
}

template <Element kElement, Output kOutput, int kSums>
__device__ __forceinline__ void write_part(const ForwardProblem& p, const Part& part, const float (&o)[kSums],
                                           const Softmax& softmax) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(softmax.total[r]);
    const int64_t row = static_cast<int64_t>(part.block) * kBlock + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
    float* lse_at = p.lse + part.head * p.lse_head + row;
    const bool some = total > 0.0f;
    float lse = some ? softmax.largest[r] * kLn2 + logf(total) : total != total ? total : minus_infinity();
    float factor = some ? 1.0f / total : total != total ? total : 0.0f, old_factor = 0.0f;
    if constexpr (kOutput == kMergeFloat) {
      const float old = *lse_at;
      __syncwarp();  // all lanes of a row have read it
      const float high = fmaxf(old, lse), reference = high == minus_infinity() ? 0.0f : high;
      const float old_weight = expf(old - reference), weight = expf(lse - reference), weights = old_weight + weight;
      const float inverse = weights > 0.0f ? 1.0f / weights : 0.0f;
      factor *= weight * inverse;
      old_factor = old_weight * inverse;
      lse = weights > 0.0f ? reference + logf(weights) : minus_infinity();
    }
    write_row<kElement, kOutput>(p, part.head, row, o, r, factor, old_factor);
    if (lane % 4 == 0) *lse_at = lse;
  }
}

}  // namespace ds_sparse_ring
