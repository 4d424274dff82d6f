// Which keys a tile reads: the union over its two halves of active key blocks, then of tiles of 64 columns.
//
// A warp walks the bitmaps of the index together; nothing is sorted or merged, but for explicit lists. Offsets of both halves
// are counted from the later half's own block ("top"): at x stands key block top - x, and half h has it on its local offset
// x - shift[h].
#pragma once

#include "merged_lists.cuh"
#include "problem.cuh"
#include "ring.cuh"
#include "tile_scheduler.cuh"

namespace ds_sparse_ring {

// bits [low, high) of a word that stands at bits [32 * word, 32 * word + 32) of a long bitmap
__device__ __forceinline__ uint32_t bits_between(int word, int low, int high) {
  const int from = max(low - 32 * word, 0), to = min(high - 32 * word, 32);
  if (from >= to) return 0;
  return (kAllLanes >> (32 - (to - from))) << from;
}

// What the index says about one half of a tile.
struct HalfReads {
  bool valid;
  int row;           // segment * P + pattern
  int own;           // its key block on local offset 0
  int first_key;     // first key block that it may read
  int64_t columns;   // where its columns begin
  int column_count;  // how many of them lie in earlier blocks
  int q_global;
};

__device__ __forceinline__ HalfReads reads_of(const ForwardProblem& p, const Half& half) {
  const Tables& t = p.tables;
  HalfReads r;
  r.valid = half.valid;
  const int block = half.valid ? half.block : 0;
  const int pattern = half.head / p.heads_per_pattern, segment = t.q_segment[block];
  r.row = segment * t.patterns + pattern;
  r.own = block + t.base;
  r.first_key = t.segments[3 * segment + 2];
  r.q_global = block * t.q_stride + t.q_start;
  r.columns = t.column_ptr ? t.column_ptr[r.row] : 0;
  r.column_count = t.column_ptr && half.valid ? t.column_end[pattern * p.q_blocks + block] : 0;
  return r;
}

// calls use(key block, flags) for each key block that a half reads, later ones first
template <class Use>
__device__ __forceinline__ void for_each_block(const ForwardProblem& p, const HalfReads (&half)[kHalves], Use use) {
  const Tables& t = p.tables;
  const int lane = threadIdx.x % 32;
  const int top = half[1].valid ? max(half[0].own, half[1].own) : half[0].own;
  int shift[kHalves], low[kHalves], high[kHalves], end = 0;
  bool own[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    shift[h] = top - half[h].own;
    low[h] = max(shift[h], top - p.k_blocks + 1);
    // a padding block's first key is huge: nothing but its own block is left
    high[h] = half[h].valid ? max(top - max(half[h].first_key, 0) + 1, 0) : 0;
    own[h] = half[h].valid && t.own && half[h].own >= 0 && half[h].own < p.k_blocks;
    end = max(end, max(high[h], own[h] ? shift[h] + 1 : 0));
  }
  for (int first = 0; 32 * first < end; first += 32) {
    const int word = first + lane;
    uint32_t bits[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int32_t* row = t.bits + static_cast<int64_t>(half[h].row) * t.words;
      const bool full = t.full != 0;
      const uint32_t inside = bits_between(word, low[h], high[h]);
      uint32_t here = 0, before = 0;
      if (inside != 0) {
        here = full ? kAllLanes : word < t.words ? static_cast<uint32_t>(row[word]) : 0;
        if (shift[h] > 0)
          before = word == 0 ? 0 : full ? kAllLanes : word <= t.words ? static_cast<uint32_t>(row[word - 1]) : 0;
      }
      bits[h] = __funnelshift_l(before, here, shift[h]) & inside;  // shift is 0 or 1
      if (own[h] && word == 0) bits[h] |= 1u << shift[h];
    }
    for (uint32_t lanes = __ballot_sync(kAllLanes, (bits[0] | bits[1]) != 0); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      const uint32_t bits_0 = __shfl_sync(kAllLanes, bits[0], source), bits_1 = __shfl_sync(kAllLanes, bits[1], source);
      for (uint32_t either = bits_0 | bits_1; either != 0; either &= either - 1) {
        const int bit = __ffs(either) - 1, x = 32 * (first + source) + bit;
        const uint32_t used = (bits_0 >> bit & 1) * kUsed | (bits_1 >> bit & 1) * (kUsed << 1);
        const uint32_t causal = (own[0] && x == shift[0] ? kCausal : 0) | (own[1] && x == shift[1] ? kCausal << 1 : 0);
        use(top - x, used | causal);
      }
    }
  }
}

// the same from explicit lists
template <class Use>
__device__ __forceinline__ void for_each_listed_block(const ForwardProblem& p, const Tile& tile, Use use) {
  const Tables& t = p.tables;
  const Half half = threadIdx.x % 32 < kHalfLanes ? tile.half[0] : tile.half[1];
  const int top = (tile.half[1].valid ? tile.half[1].block : tile.half[0].block) + t.base, own = half.block + t.base;
  const int own_at = half.valid && t.own && own >= 0 && own < p.k_blocks ? top - own : -1;  // it comes first
  int begin = 0, last = -1;
  if (half.valid) {
    const int row = half.head / p.heads_per_pattern * p.q_blocks + half.block;
    begin = t.list_ptr[row], last = t.list_ptr[row + 1] - 1;
  }
  const auto entry = [&](int i) { return -i >= begin ? top - t.list_values[-i] : kBehindAll; };  // from the last one on
  for_each_of_either(own_at, -last, entry, [&](int x, uint32_t halves) {
    const uint32_t owns = (top - x == tile.half[0].block + t.base) | (top - x == tile.half[1].block + t.base) << 1;
    use(top - x, halves * kUsed | (t.own ? halves & owns : 0) * kCausal);
  });
}

// Global blocks of a lane's two columns of a tile, and the words of the bitmap that say whether diagonals cover them.
struct ColumnLookup {
  int block[2];
  uint32_t word[kHalves][2];
};

// calls use(first column, flags, mask) for each tile of 64 columns of a row that a half reads; count[h] 0: half h reads none
template <class Use>
__device__ __forceinline__ void for_each_column_tile(const Tables& t, const HalfReads& row, const int (&q_global)[kHalves],
                                                     const int (&count)[kHalves], Use use) {
  const int lane = threadIdx.x % 32, most = max(count[0], count[1]);
  const int64_t* ids = t.column_ids + row.columns;
  const int32_t* bits = t.column_bits + static_cast<int64_t>(row.row) * t.column_words;
  ColumnLookup at;
  int ahead[2];
  const auto load_blocks = [&](int first, int (&block)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = first + 32 * i + lane;
      block[i] = c < most ? static_cast<int>(ids[c] / kBlock) : 0;
    }
  };
  const auto load_words = [&](int first) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int offset = q_global[h] - at.block[i];
        at.word[h][i] = first + 32 * i + lane < count[h] ? static_cast<uint32_t>(bits[offset >> 5]) : 0;
      }
  };
  // words are loaded one tile ahead and what they depend on two, so that no tile waits for memory
  load_blocks(0, at.block);
  load_blocks(64, ahead);
  load_words(0);
  for (int first = 0; first < most; first += 64) {
    uint32_t mask[kHalves][2];
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int offset = q_global[h] - at.block[i];
        const bool covered = at.word[h][i] >> (offset & 31) & 1;
        mask[h][i] = __ballot_sync(kAllLanes, first + 32 * i + lane < count[h] && !covered);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) at.block[i] = ahead[i];
    load_words(first + 64);
    load_blocks(first + 128, ahead);
    const uint32_t used = ((mask[0][0] | mask[0][1]) != 0 ? kUsed : 0) | ((mask[1][0] | mask[1][1]) != 0 ? kUsed << 1 : 0);
    if (used) use(first, used | kMasked, mask);
  }
}

// both halves together where they share a row of columns, one after the other where they do not
template <class Use>
__device__ __forceinline__ void for_each_column_tile(const ForwardProblem& p, const HalfReads (&half)[kHalves], Use use) {
  const int q_global[kHalves] = {half[0].q_global, half[1].q_global};
  const bool together = half[0].row == half[1].row || !half[1].valid;
  for (int h = 0; h < (together ? 1 : kHalves); ++h) {
    const int count[kHalves] = {h == 0 ? half[0].column_count : 0, h == 1 || together ? half[1].column_count : 0};
    if (max(count[0], count[1]) == 0) continue;
    const int64_t begin = h == 0 ? half[0].columns : half[1].columns;
    HalfReads row = half[0];
    row.columns = begin;
    row.row = h == 0 ? half[0].row : half[1].row;
    for_each_column_tile(p.tables, row, q_global, count, [&](int first, uint32_t flags, const uint32_t (&mask)[kHalves][2]) {
      use(begin + first, flags, mask);
    });
  }
}

}  // namespace ds_sparse_ring
