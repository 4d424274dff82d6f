// What the forward kernel is asked to do: one span of query blocks, one span of key blocks, and the tables of the index on
// them.
//
// S segments, P patterns, H query heads, K key/value heads, n query blocks, m key blocks, C columns, D dims (64 or 128).
// row = segment * P + pattern. The tables are those of kernels/hop_index.py, one to one.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "element.cuh"

namespace ds_sparse_ring {

constexpr int kBlock = 64;
constexpr int kHeadSize = 128;

struct Tables {
  int full;                    // 1: all earlier blocks of the document are active, `bits` is not read
  int own;                     // 1: local offset 0 is block diagonal 0
  int base;                    // key block of query block l on local offset 0 is l + base
  int q_stride, q_start;       // global query block = q_stride * l + q_start
  int patterns, words;         // P; words of a row of `bits`
  const int32_t* segments;     // [S, 3] first query block, one past the last, first key block that they may read
  const int32_t* q_segment;    // [n]
  const int32_t* bits;         // [S * P, words] active local offsets, without block diagonal 0
  int column_words;            // words of a row of `column_bits`
  const int64_t* column_ptr;   // [S * P + 1]; null: no columns in this call
  const int64_t* column_ids;   // [C] global tokens, ascending within a row
  const int32_t* column_end;   // [P, n] columns of a query block's row in earlier blocks
  const int32_t* column_bits;  // [S * P, column_words] active global block diagonals
  // explicit lists in place of `bits` and columns; null: none
  const int32_t* list_ptr;       // [P * n + 1] row = pattern * n + query block
  const int32_t* list_values;    // key blocks, ascending within a row, a query block's own left out
  const int32_t* reader_ptr;     // [P * m + 1] the transpose: row = pattern * m + key block
  const int32_t* reader_values;  // query blocks, ascending within a row
};

enum Output : int { kWriteElement = 0, kWriteFloat = 1, kMergeFloat = 2 };

struct ForwardProblem {
  const void *q, *k, *v;  // [H, n * 64, D], [K, m * 64, D] twice
  int64_t q_head, k_head, v_head, q_row, k_row, v_row;  // elements from a head or row to the next: multiples of 8
  const void *column_k, *column_v;  // [C, D]
  int64_t columns, column_k_row, column_v_row;
  void* o;     // [H, n * 64, D], the type of q or fp32; heads o_head and rows o_row elements apart
  float* lse;  // [H, n * 64] natural logarithm, heads lse_head apart
  int64_t o_head, o_row, lse_head;
  int heads, kv_heads, q_blocks, k_blocks, heads_per_pattern;
  int heads_together;  // that share both a pattern and a KV head, from each multiple of this number on
  float scale_log2;  // softmax scale * log2(e)
  Element element;  // of q, k, v and the columns
  int head_size;
  Output output;
  int32_t* next_tile;  // device memory, 4 bytes; the launch sets it to 0
  Tables tables;
};

// What the kernel gets: the problem with maps for the copy engine (box: 64 rows x 64 dims, swizzled by 128 bytes).
struct ForwardArguments {
  CUtensorMap q, k, v, column_k, column_v;
  ForwardProblem problem;
};

}  // namespace ds_sparse_ring
