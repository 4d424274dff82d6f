// Which tile comes next, and what its parts are.
//
// Tiles are handed out by a counter, so that a multiprocessor that got heavy heads takes fewer tiles. The order keeps one
// key/value head at a time in L2, late (long) query blocks first, the heads that share keys beside each other; what is handed
// out last is short.
#pragma once

#include "problem.cuh"

namespace ds_sparse_ring {

struct Part {
  int head, block;
  bool valid;  // false: behind the last query block
};

template <int kParts>
struct Tile {
  int kv_head;
  Part part[kParts];
};

// Heads that share a pattern read the same keys, two blocks of one head do not: the parts of a tile are consecutive in an order of
// query blocks in which `together` such heads vary first.
template <int kParts>
struct TileScheduler {
  int group, together, slots, rows, tiles;  // heads of a KV head; tiles beside each other; tiles along the queries; in all
  int q_blocks;

  __host__ __device__ explicit TileScheduler(const ForwardProblem& p) : group(p.heads / p.kv_heads), q_blocks(p.q_blocks) {
    together = kParts > 2 ? p.heads_together : p.heads_together % 2 ? 1 : 2;  // two parts: one block's, or one head's
    slots = group / together;
    rows = (q_blocks * together + kParts - 1) / kParts;
    tiles = p.kv_heads * slots * rows;
  }

  __device__ __forceinline__ Part part_of(int number, int h) const {
    const int kv_head = number / (rows * slots), rest = number % (rows * slots);
    const int row = rows - 1 - rest / slots, slot = rest % slots, at = row * kParts + h;
    Part part;
    if constexpr (kParts == 2) {  // without divisions, for which there are no registers at 64 dims
      const bool one_block = together == 2;
      part.head = kv_head * group + (one_block ? slot * 2 + h : slot);
      part.block = one_block ? row : at;
    } else {
      part.head = kv_head * group + slot * together + at % together;
      part.block = at / together;
    }
    part.valid = part.block < q_blocks;
    return part;
  }

  __device__ __forceinline__ Tile<kParts> tile_of(int number) const {
    Tile<kParts> tile;
    tile.kv_head = number / (rows * slots);
#pragma unroll
    for (int h = 0; h < kParts; ++h) tile.part[h] = part_of(number, h);
    return tile;
  }
};

}  // namespace ds_sparse_ring
