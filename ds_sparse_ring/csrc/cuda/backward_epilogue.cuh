// From a warpgroup's sums to the gradients of its keys and values. A key has one writer in a call, a column one for each part of
// the queries.
#pragma once

#include "ptx_out.cuh"
#include "readers.cuh"
#include "softmax.cuh"

namespace ds_sparse_ring {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kHuge = 1.0e30f;  // finite, so that it meets -inf without becoming NaN

// out[row] += factor * x, both [64, 2 * kSums]: a thread has rows 16 warp + lane / 4 (+ 8) and, of every 8 dims, 2 (lane % 4) and the next one
template <int kSums>
__device__ __forceinline__ void add_rows(float* out, int64_t row_stride, int rows, const float (&x)[kSums], float factor) {
  const int thread = static_cast<int>(thread_now()), lane = thread % 32, first = thread % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first + 8 * r >= rows) continue;
    float* at = out + (first + 8 * r) * row_stride + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) add_pair(at + 8 * j, x[4 * j + 2 * r] * factor, x[4 * j + 2 * r + 1] * factor);
  }
}

template <int kSums>
__device__ __forceinline__ void add_key_gradients(const BackwardProblem& p, const KeyTile& tile, int half,
                                                  const float (&dk)[kSums], float dk_factor, const float (&dv)[kSums],
                                                  float dv_factor) {
  constexpr int kDims = 2 * kSums;
  if (tile.columns) {
    const int64_t at = (tile.first + half * kBlock) * kDims;
    add_rows(p.d_column_k + at, kDims, tile.count - half * kBlock, dk, dk_factor);
    add_rows(p.d_column_v + at, kDims, tile.count - half * kBlock, dv, dv_factor);
  } else {
    const int64_t row = int64_t{tile.key + half} * kBlock;
    add_rows(p.dk + tile.kv_head * p.dk_head + row * p.dk_row, p.dk_row, kBlock, dk, dk_factor);
    add_rows(p.dv + tile.kv_head * p.dv_head + row * p.dv_row, p.dv_row, kBlock, dv, dv_factor);
  }
}

}  // namespace ds_sparse_ring
