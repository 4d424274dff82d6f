// Which tile comes next, and what its two halves are.
//
// Tiles are handed out by a counter, so that a multiprocessor that got heavy heads takes fewer tiles. The order keeps one
// key/value head at a time in L2, late (long) query blocks first, the heads that share keys beside each other; what is handed
// out last is short.
#pragma once

#include "problem.cuh"

namespace ds_sparse_ring {

struct Half {
  int head, block;
  bool valid;  // false: behind the last query block
};

struct Tile {
  int kv_head;
  Half half[kHalves];
};

struct TileScheduler {
  int group, slots, rows, tiles;  // heads of a KV head; tiles beside each other; tiles along the queries; in all
  int q_blocks;
  Pairing pairing;

  __host__ __device__ explicit TileScheduler(const ForwardProblem& p)
      : group(p.heads / p.kv_heads), q_blocks(p.q_blocks), pairing(p.pairing) {
    slots = pairing == kPairHeads ? group / kHalves : group;
    rows = pairing == kPairHeads ? q_blocks : (q_blocks + kHalves - 1) / kHalves;
    tiles = p.kv_heads * slots * rows;
  }

  __device__ __forceinline__ Half half_of(int number, int h) const {
    const int kv_head = number / (rows * slots), rest = number % (rows * slots);
    const int row = rows - 1 - rest / slots, slot = rest % slots;
    Half half;
    half.head = kv_head * group + (pairing == kPairHeads ? slot * kHalves + h : slot);
    half.block = pairing == kPairHeads ? row : row * kHalves + h;
    half.valid = half.block < q_blocks;
    return half;
  }

  __device__ __forceinline__ Tile tile_of(int number) const {
    Tile tile;
    tile.kv_head = number / (rows * slots);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) tile.half[h] = half_of(number, h);
    return tile;
  }
};

}  // namespace ds_sparse_ring
