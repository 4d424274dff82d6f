// Which query blocks read a tile of keys: the mirror image of active_blocks.cuh.
//
// A warp walks the bitmaps of the index together, or merges explicit lists. Offsets of both halves are counted from the earlier
// key block: query block i stands at y = i - (first key block - base), and half h is on its local offset y - h.
#pragma once

#include "backward.cuh"
#include "backward_ring.cuh"
#include "tile_scheduler.cuh"
// which comes before
#include "active_blocks.cuh"

namespace ds_sparse_ring {

constexpr int kTileColumns = 128;

// Tiles are handed out by a counter: columns first, one part of the queries after the other, then one key/value head after the
// other, early (long) key blocks first, so that what is handed out last is short.
struct KeyTile {
  bool columns;
  int kv_head, key;       // blocks: two key blocks from `key`
  int row;                // columns: segment * P + pattern, -1: no tile
  int64_t first;          // columns: the first one
  int count;              // columns: of the row, from the first one
  int part;               // columns: of the queries
};

__host__ __device__ inline int key_pairs(const BackwardProblem& p) { return (p.k_blocks + 1) / 2; }
__host__ __device__ inline int key_tiles(const BackwardProblem& p) {
  return p.column_tiles * p.column_parts + (p.last_head - p.first_head) / (p.heads / p.kv_heads) * key_pairs(p);
}

// Few tiles of columns, each with all queries of a segment, would last as long as one of them: 8 a multiprocessor at least.
inline int column_parts_of(const BackwardProblem& p, int multiprocessors) {
  const int parts = 8 * multiprocessors / (p.column_tiles > 0 ? p.column_tiles : 1) + 1;
  return parts < 8 ? parts : 8;
}

__device__ __forceinline__ KeyTile key_tile_of(const BackwardProblem& p, int number) {
  KeyTile tile;
  const int column_tiles = p.column_tiles * p.column_parts;
  tile.columns = number < column_tiles;
  tile.kv_head = 0, tile.key = 0, tile.row = 0, tile.first = 0, tile.count = 0, tile.part = 0;
  if (tile.columns) {
    tile.part = number / p.column_tiles;
    number -= tile.part * p.column_tiles;
    tile.row = p.column_tile_row[number];
    if (tile.row >= 0) {
      tile.first = p.tables.column_ptr[tile.row] + p.column_tile_begin[number];
      tile.count = static_cast<int>(p.tables.column_ptr[tile.row + 1] - tile.first);
    }
  } else {
    const int pairs = key_pairs(p);
    tile.kv_head = p.first_head / (p.heads / p.kv_heads) + (number - column_tiles) / pairs;
    tile.key = (number - column_tiles) % pairs * 2;
  }
  return tile;
}

// calls use(query block, flags) for each query block of a segment that reads key block `key` or the one behind it
template <class Use>
__device__ __forceinline__ void for_each_reader(const BackwardProblem& p, int key, int segment, int pattern, Use use) {
  const Tables& t = p.tables;
  const int lane = threadIdx.x % 32;
  const int first = t.segments[3 * segment], end = t.segments[3 * segment + 1], first_key = t.segments[3 * segment + 2];
  const int origin = key - t.base, from = first - origin, to = end - origin;
  const int32_t* row = t.bits + (static_cast<int64_t>(segment) * t.patterns + pattern) * t.words;
  int high[2];
  bool own[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool valid = key + h < p.k_blocks;
    high[h] = valid && key + h >= first_key ? to : 0;
    own[h] = valid && t.own && from <= h && h < to;
  }
  for (int begin = max(from, 0) / 32; 32 * begin < to; begin += 32) {
    const int word = begin + lane;
    const uint32_t inside[2] = {bits_between(word, max(from, 0), high[0]), bits_between(word, max(from, 1), high[1])};
    uint32_t here = 0, before = 0;
    if ((inside[0] | inside[1]) != 0) {
      here = t.full ? kAllLanes : word < t.words ? static_cast<uint32_t>(row[word]) : 0;
      before = word == 0 ? 0 : t.full ? kAllLanes : word <= t.words ? static_cast<uint32_t>(row[word - 1]) : 0;
    }
    uint32_t bits[2] = {here & inside[0], __funnelshift_l(before, here, 1) & inside[1]};
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (own[h] && word == 0) bits[h] |= 1u << h;
    for (uint32_t lanes = __ballot_sync(kAllLanes, (bits[0] | bits[1]) != 0); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      const uint32_t bits_0 = __shfl_sync(kAllLanes, bits[0], source), bits_1 = __shfl_sync(kAllLanes, bits[1], source);
      for (uint32_t either = bits_0 | bits_1; either != 0; either &= either - 1) {
        const int bit = __ffs(either) - 1, y = 32 * (begin + source) + bit;
        const uint32_t reads = (bits_0 >> bit & 1) * kReads | (bits_1 >> bit & 1) * (kReads << 1);
        const uint32_t causal = (own[0] && y == 0 ? kOwnBlock : 0) | (own[1] && y == 1 ? kOwnBlock << 1 : 0);
        use(origin + y, reads | causal);
      }
    }
  }
}

// the same from explicit lists
template <class Use>
__device__ __forceinline__ void for_each_listed_reader(const BackwardProblem& p, int key, int segment, int pattern, Use use) {
  const Tables& t = p.tables;
  const int mine = key + static_cast<int>(thread_now() % 32) / kListLanes<2>;  // the key block of the lane's half
  const int from = t.segments[3 * segment], to = t.segments[3 * segment + 1];
  int first = 0, end = 0, own = -1;  // its own query block comes first
  if (mine < p.k_blocks) {
    const int row = pattern * p.k_blocks + mine;
    first = t.reader_ptr[row], end = t.reader_ptr[row + 1];
    if (t.own && mine - t.base >= from && mine - t.base < to) own = mine - t.base;
  }
  first = first_not_below(t.reader_values, first, end, from);
  const auto entry = [&](int i) {
    const int block = i < end ? t.reader_values[i] : kBehindAll;
    return block < to ? block : kBehindAll;
  };
  for_each_of_any<2>(own, first, entry, [&](int block, uint32_t halves) {
    const uint32_t owns = block == key - t.base ? 1 : block == key + 1 - t.base ? 2 : 0;
    use(block, halves * kReads | (t.own ? halves & owns : 0) * kOwnBlock);
  });
}

// calls use(query block, flags, mask) for each query block of the tile's part that reads one of its columns, those from `begin` on
// first
template <class Use>
__device__ __forceinline__ void for_each_column_reader(const BackwardProblem& p, const KeyTile& tile, int begin, Use use) {
  const Tables& t = p.tables;
  const int lane = threadIdx.x % 32, segment = tile.row / t.patterns;
  const int64_t* ids = t.column_ids + tile.first;
  const int32_t* bits = t.column_bits + static_cast<int64_t>(tile.row) * t.column_words;
  int block[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    block[i] = 32 * i + lane < tile.count ? static_cast<int>(ids[32 * i + lane] / kBlock) : kBehindAll;
  const int earliest = __shfl_sync(kAllLanes, block[0], 0);
  const int segment_first = t.segments[3 * segment], blocks = t.segments[3 * segment + 1] - segment_first;
  // the first query block behind the tile's earliest column
  const int behind = (max(earliest + 1 - t.q_start, 0) + t.q_stride - 1) / t.q_stride;
  const int first = max(segment_first + blocks * tile.part / p.column_parts, behind);
  const int end = segment_first + blocks * (tile.part + 1) / p.column_parts;
  int q = first <= begin && begin < end ? begin : first;
  for (int left = end - first; left > 0; --left, q = q + 1 < end ? q + 1 : first) {
    uint32_t mask[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int offset = q * t.q_stride + t.q_start - block[i];
      bool counts = offset > 0;
      if (counts) counts = !(static_cast<uint32_t>(bits[offset >> 5]) >> (offset & 31) & 1);
      mask[i / 2][i % 2] = __ballot_sync(kAllLanes, counts);
    }
    const uint32_t reads = ((mask[0][0] | mask[0][1]) != 0 ? kReads : 0) | ((mask[1][0] | mask[1][1]) != 0 ? kReads << 1 : 0);
    if (reads) use(q, reads | kSomeColumns, mask);
  }
}

}  // namespace ds_sparse_ring
