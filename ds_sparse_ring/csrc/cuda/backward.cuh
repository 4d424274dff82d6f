// What the backward kernel is asked to do, and its launch.
//
// Letters as in problem.cuh. Gradients are added to what is there, in no fixed order; dq by the copy engine.
#pragma once

#include <cuda_runtime.h>

#include "problem.cuh"

namespace ds_sparse_ring {

constexpr int kMeetings = 128;             // words that say where tiles of columns are
constexpr int kCounters = 2 + kMeetings;  // of a launch

struct BackwardProblem {
  const void *q, *k, *v, *d_o;  // [H, n * 64, D], [K, m * 64, D] twice, [H, n * 64, D]
  int64_t q_head, k_head, v_head, do_head, q_row, k_row, v_row, do_row;  // elements from a head or row to the next: multiples of 8
  const float *lse, *delta;  // [H, n * 64], heads lse_head and delta_head apart: natural logarithm; row sums of do * o
  int64_t lse_head, delta_head;
  const void *column_k, *column_v;  // [C, D]
  int64_t columns, column_k_row, column_v_row;
  float *dq, *dk, *dv;  // dq: of the heads of this call, strides are multiples of 4; dk and dv as k and v, multiples of 2
  int64_t dq_head, dk_head, dv_head, dq_row, dk_row, dv_row;
  float *d_column_k, *d_column_v;  // [C, D]
  int heads, kv_heads, q_blocks, k_blocks, heads_per_pattern;
  int first_head, last_head;  // this call, and dq: query heads from the first to before the last, of whole key/value heads
  Element element;          // of q, k, v, do and the columns
  int head_size;
  float scale, scale_log2, log2_scale;  // softmax scale, > 0; times log2(e); its logarithm
  bool overwrite_dq;        // dq is set to zero first
  int32_t* next_tile;       // device memory, kCounters; the launch sets them to 0: tiles handed out, where to meet
  Tables tables;
  const int32_t* k_segments;                              // [m, 2] segments (from, to) that may read each key block
  const int32_t *column_tile_row, *column_tile_begin;     // [tiles] of 128 columns: row, and first column within it; row -1: none
  int column_tiles;
  int column_parts;  // of the queries, one after the other for all tiles of columns: see column_parts_of
};

// What the kernel gets. Boxes: 64 rows x 64 dims of 2 bytes, for dq 64 rows x 32 dims of fp32; swizzled by 128 bytes.
struct BackwardArguments {
  CUtensorMap q, k, v, d_o, column_k, column_v, dq;
  BackwardProblem problem;
};

// Queues the kernel on at most so many multiprocessors; nothing waits. An error names what the driver or the runtime refused.
cudaError_t launch_backward(const BackwardProblem& problem, int multiprocessors, cudaStream_t stream);

// The kernel of one element type and head size: backward_<type>_<size>.cu.
template <Element kElement, int kDims>
cudaError_t launch_backward(const BackwardArguments& a, int blocks, cudaStream_t stream);

}  // namespace ds_sparse_ring
