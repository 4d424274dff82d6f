// Which keys a tile reads: the union over its parts of active key blocks, then of tiles of 64 columns.
//
// A warp walks the bitmaps of the index together; nothing is sorted or merged, but for explicit lists. Offsets of all parts
// are counted from the last part's own block ("top"): at x stands key block top - x, and part h has it on its local offset
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

// What the index says about one part of a tile.
struct PartReads {
  bool valid;
  int row;           // segment * P + pattern
  int own;           // its key block on local offset 0
  int first_key;     // first key block that it may read
  int64_t columns;   // where its columns begin
  int column_count;  // how many of them lie in earlier blocks
  int q_global;
};

__device__ __forceinline__ PartReads reads_of(const ForwardProblem& p, const Part& part) {
  const Tables& t = p.tables;
  PartReads r;
  r.valid = part.valid;
  const int block = part.valid ? part.block : 0;
  const int pattern = part.head / p.heads_per_pattern, segment = t.q_segment[block];
  r.row = segment * t.patterns + pattern;
  r.own = block + t.base;
  r.first_key = t.segments[3 * segment + 2];
  r.q_global = block * t.q_stride + t.q_start;
  r.columns = t.column_ptr ? t.column_ptr[r.row] : 0;
  r.column_count = t.column_ptr && part.valid ? t.column_end[pattern * p.q_blocks + block] : 0;
  return r;
}

// the last valid part's own block; a tile's query blocks ascend
template <int kParts>
__device__ __forceinline__ int last_own(const PartReads (&part)[kParts]) {
  int top = part[0].own;
#pragma unroll
  for (int h = 1; h < kParts; ++h)
    if (part[h].valid) top = max(top, part[h].own);
  return top;
}

// calls use(key block, flags) for each key block that a part reads, later ones first
template <int kParts, class Use>
__device__ __forceinline__ void for_each_block(const ForwardProblem& p, const PartReads (&part)[kParts], Use use) {
  const Tables& t = p.tables;
  const int lane = threadIdx.x % 32, top = last_own(part);
  int shift[kParts], low[kParts], high[kParts], end = 0;
  bool own[kParts];
#pragma unroll
  for (int h = 0; h < kParts; ++h) {
    shift[h] = top - part[h].own;
    low[h] = max(shift[h], top - p.k_blocks + 1);
    // a padding block's first key is huge: nothing but its own block is left
    high[h] = part[h].valid ? max(top - max(part[h].first_key, 0) + 1, 0) : 0;
    own[h] = part[h].valid && t.own && part[h].own >= 0 && part[h].own < p.k_blocks;
    end = max(end, max(high[h], own[h] ? shift[h] + 1 : 0));
  }
  for (int first = 0; 32 * first < end; first += 32) {
    const int word = first + lane;
    uint32_t bits[kParts], any = 0;
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      const int32_t* row = t.bits + static_cast<int64_t>(part[h].row) * t.words;
      const bool full = t.full != 0;
      const uint32_t inside = bits_between(word, low[h], high[h]);
      uint32_t here = 0, before = 0;
      if (inside != 0) {
        here = full ? kAllLanes : word < t.words ? static_cast<uint32_t>(row[word]) : 0;
        if (shift[h] > 0)
          before = word == 0 ? 0 : full ? kAllLanes : word <= t.words ? static_cast<uint32_t>(row[word - 1]) : 0;
      }
      bits[h] = __funnelshift_l(before, here, shift[h]) & inside;  // shift is below kParts
      if (own[h] && word == 0) bits[h] |= 1u << shift[h];
      any |= bits[h];
    }
    for (uint32_t lanes = __ballot_sync(kAllLanes, any != 0); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      uint32_t mine[kParts], some = 0;
#pragma unroll
      for (int h = 0; h < kParts; ++h) some |= mine[h] = __shfl_sync(kAllLanes, bits[h], source);
      for (; some != 0; some &= some - 1) {
        const int bit = __ffs(some) - 1, x = 32 * (first + source) + bit;
        uint32_t flags = 0;
#pragma unroll
        for (int h = 0; h < kParts; ++h) {
          flags |= (mine[h] >> bit & 1) * (kUsed << h);
          if (own[h] && x == shift[h]) flags |= kCausal << h;
        }
        use(top - x, flags);
      }
    }
  }
}

// the same from explicit lists
template <int kParts, class Use>
__device__ __forceinline__ void for_each_listed_block(const ForwardProblem& p, const Tile<kParts>& tile, Use use) {
  const Tables& t = p.tables;
  const int list = static_cast<int>(threadIdx.x % 32) / kListLanes<kParts>;
  Part part = {0, 0, false};  // of the lane
  int top = 0;
#pragma unroll
  for (int h = 0; h < kParts; ++h) {
    if (list == h) part = tile.part[h];
    if (tile.part[h].valid) top = tile.part[h].block + t.base;
  }
  const int own = part.block + t.base;
  const int own_at = part.valid && t.own && own >= 0 && own < p.k_blocks ? top - own : -1;  // it comes first
  int begin = 0, last = -1;
  if (part.valid) {
    const int row = part.head / p.heads_per_pattern * p.q_blocks + part.block;
    begin = t.list_ptr[row], last = t.list_ptr[row + 1] - 1;
  }
  const auto entry = [&](int i) { return -i >= begin ? top - t.list_values[-i] : kBehindAll; };  // from the last one on
  for_each_of_any<kParts>(own_at, -last, entry, [&](int x, uint32_t parts) {
    uint32_t owns = 0;
#pragma unroll
    for (int h = 0; h < kParts; ++h) owns |= (top - x == tile.part[h].block + t.base) << h;
    use(top - x, parts * kUsed | (t.own ? parts & owns : 0) * kCausal);
  });
}

// Global blocks of a lane's two columns of a tile, and the words of the bitmap that say whether diagonals cover them.
template <int kParts>
struct ColumnLookup {
  int block[2];
  uint32_t word[kParts][2];
};

// calls use(first column, flags, mask) for each tile of 64 of a row's columns, which begin at `begin`, that a part reads;
// count[h] 0: part h reads none
template <int kParts, class Use>
__device__ __forceinline__ void for_each_column_tile(const Tables& t, int row, int64_t begin, const PartReads (&part)[kParts],
                                                     const int (&count)[kParts], Use use) {
  const int lane = threadIdx.x % 32;
  int most = 0;
#pragma unroll
  for (int h = 0; h < kParts; ++h) most = max(most, count[h]);
  const int64_t* ids = t.column_ids + begin;
  const int32_t* bits = t.column_bits + static_cast<int64_t>(row) * t.column_words;
  ColumnLookup<kParts> at;
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
    for (int h = 0; h < kParts; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int offset = part[h].q_global - at.block[i];
        at.word[h][i] = first + 32 * i + lane < count[h] ? static_cast<uint32_t>(bits[offset >> 5]) : 0;
      }
  };
  // words are loaded one tile ahead and what they depend on two, so that no tile waits for memory
  load_blocks(0, at.block);
  load_blocks(64, ahead);
  load_words(0);
  for (int first = 0; first < most; first += 64) {
    uint32_t mask[kParts][2], used = 0;
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int offset = part[h].q_global - at.block[i];
        const bool covered = at.word[h][i] >> (offset & 31) & 1;
        mask[h][i] = __ballot_sync(kAllLanes, first + 32 * i + lane < count[h] && !covered);
      }
      if ((mask[h][0] | mask[h][1]) != 0) used |= kUsed << h;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) at.block[i] = ahead[i];
    load_words(first + 64);
    load_blocks(first + 128, ahead);
    if (used) use(begin + first, used | kMasked, mask);
  }
}

// parts that share a row of columns together, one row after the other; a tile's segments ascend, and so do its rows
template <int kParts, class Use>
__device__ __forceinline__ void for_each_column_tile(const ForwardProblem& p, const PartReads (&part)[kParts], Use use) {
  constexpr int kNoRow = 1 << 30;
  int next;
  for (int row = part[0].row; row != kNoRow; row = next) {
    next = kNoRow;
    int64_t begin = 0;
    int count[kParts];
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      const bool here = part[h].row == row;
      count[h] = here ? part[h].column_count : 0;
      if (here) begin = part[h].columns;
      if (part[h].row > row) next = min(next, part[h].row);
    }
    for_each_column_tile(p.tables, row, begin, part, count, use);
  }
}

}  // namespace ds_sparse_ring
