// Which keys the queries want, see select/every_query.py: what the kernel is asked to do, and its launch.
//
// H query heads, K key/value heads, n query blocks, N tokens of keys, D dims (64 or 128). One look at q k^T: of each row and block
// of 64 keys the largest score goes into a running sum, and keys at or above the row's limit get a bit.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "element.cuh"

namespace ds_sparse_ring {

constexpr int kMostTileHeads = 4;  // query heads of a tile: a warpgroup for each

struct WantedProblem {
  const void *q, *k;                     // [H, n * 64, D], [K, N, D]
  int64_t q_head, q_row, k_head, k_row;  // elements from a head or row to the next: multiples of 8
  int64_t tokens;                        // N
  int heads, kv_heads, q_blocks, heads_per_pattern, head_size;
  Element element;
  int window;                // blocks that a query block reads anyway, its own and those before it
  float scale_log2;          // above 0: scale of scores * log2(e)
  float price, log2_price;   // share of the sum from which on a key is wanted
  // [n] each, LocalRows of select/every_query.py: global number, first block of the document, tokens that are not filled up, first
  // slot of the segment, slots of a pattern
  const int64_t *block, *first, *valid, *slot, *reach;
  unsigned long long* words;  // by slot, a bit a key
  int tile_heads, tiles;      // heads of a tile, tiles of a KV head and query block: the launch sets them
};

struct WantedArguments {
  CUtensorMap k;  // box: 64 rows x 64 dims, swizzled by 128 bytes
  WantedProblem problem;
};

// the fewest tiles that a KV head's query heads fit into, as even as can be
inline void cut_into_tiles(WantedProblem& p) {
  const int group = p.heads / p.kv_heads;
  p.tiles = (group + kMostTileHeads - 1) / kMostTileHeads;
  p.tile_heads = (group + p.tiles - 1) / p.tiles;
}

// Queues the kernel; nothing waits. An error names what the driver or the runtime refused.
cudaError_t launch_wanted(const WantedProblem& problem, cudaStream_t stream);

// The kernel of one element type and head size: wanted_<type>_<size>.cu.
template <Element kElement, int kHeadSize>
cudaError_t launch_wanted(const WantedArguments& a, cudaStream_t stream);

}  // namespace ds_sparse_ring
