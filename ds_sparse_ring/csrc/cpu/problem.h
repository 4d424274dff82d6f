// What one kernel call works on: plain pointers and sizes, the same for every instruction set.
//
// A block is 64 tokens. Queries are local blocks 0 .. q_blocks - 1 of a span whose global number is q_stride * local + q_start;
// keys likewise. D is a multiple of 16. All tensors are contiguous float32.
#pragma once

#include <cstdint>

namespace ds_sparse_ring {

constexpr int64_t kBlock = 64;

enum class IndexKind : int64_t { kFull = 0, kVerticalSlash = 1, kBlockLists = 2 };

struct Segment {  // query blocks [begin, end) of the document that starts at document_begin
  int64_t begin, end, document_begin, is_padding;
};

struct Index {
  IndexKind kind;
  int64_t segments, patterns, heads_per_pattern;
  const Segment* segment;
  // VerticalSlash: row = segment * patterns + pattern
  const int64_t *diagonal_ptr, *diagonals, *column_ptr, *columns;
  // BlockLists: row = pattern * blocks + query block (global)
  int64_t blocks;
  const int64_t *block_ptr, *block_values;
};

struct Problem {
  int64_t heads, kv_heads, q_blocks, k_blocks, head_size;
  int64_t q_stride, q_start, k_stride, k_start;
  Index index;
  float scale;
  const float *q, *k, *v;                // [H, n, D], [K, m, D]
  const float *column_k, *column_v;      // [C, D], or null when the call has no columns
};

struct ForwardOutput {
  float *o, *lse;  // [H, n, D], [H, n]: merged into
};

struct BackwardInput {
  const float *d_o, *lse, *delta;  // [H, n, D], [H, n], [H, n]
};

struct BackwardOutput {
  float *dq, *dk, *dv, *d_column_k, *d_column_v;  // added to
};

#define DSR_DECLARE(isa)                                        \
  namespace isa {                                               \
  void forward(const Problem&, const ForwardOutput&, int threads);  \
  void backward(const Problem&, const BackwardInput&, const BackwardOutput&, int threads); \
  }
DSR_DECLARE(baseline)
DSR_DECLARE(avx2)
DSR_DECLARE(avx512)
#undef DSR_DECLARE

}  // namespace ds_sparse_ring
