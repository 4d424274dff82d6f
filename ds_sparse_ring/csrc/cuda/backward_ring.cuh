// Shared memory of the backward kernel, and who waits for what.
//
// A tile is 128 keys of a key/value head (two key blocks, or two tiles of columns), 64 for each of two warpgroups. Its keys and
// values stay while stages pass: the queries and output gradients of one query block, with a note which half uses it. A stage
// without queries says that a tile ends and the next one begins: only then are the keys given back and replaced.
#pragma once

#include "ptx_out.cuh"
#include "wgmma_shared.cuh"

namespace ds_sparse_ring {

constexpr uint32_t kRowBytes = 64 * 4;         // lse or delta of a stage
constexpr uint32_t kSumBytes = 2 * kBoxBytes;  // 64 queries x 64 dims of fp32: two boxes
constexpr int kBackwardConsumerWarps = 8;
constexpr uint32_t kBackwardSharedBytes = 227 * 1024;  // of a block

enum QueryNoteFlag : uint32_t {
  kReads = 1,         // << half: this query block reads the half's keys
  kReadsBoth = 3,     // their sum leaves in one piece
  kOwnBlock = 4,      // << half: element-wise causal
  kSomeColumns = 16,  // `mask` says which keys count
  kTileBegins = 32,   // tile `block`
  kNoMore = 64,
  kNoQueries = kTileBegins | kNoMore,
};

// Words of a note. `kNoteMask`: four words, [half][keys 0 to 31, 32 to 63].
enum QueryNote : uint32_t { kNoteFlags = 0, kNoteHead = 4, kNoteBlock = 8, kNoteMask = 12, kNoteBytes = 32 };

template <int kDims>
struct BackwardMemory {
  static constexpr uint32_t tile_bytes = kDims / 64 * kBoxBytes, stage_bytes = 2 * tile_bytes;  // queries, output gradients
  static constexpr uint32_t keys_bytes = 4 * tile_bytes, other_bytes = 4 * kBoxBytes + 2 * kSumBytes;
  static constexpr uint32_t stage_count = (kBackwardSharedBytes - keys_bytes - other_bytes - 6 * 8) / (stage_bytes + 2 * kRowBytes + kNoteBytes + 16);
  static constexpr uint32_t bytes = keys_bytes + other_bytes + 6 * 8 + stage_count * (stage_bytes + 2 * kRowBytes + kNoteBytes + 16);
  // warps that make the query gradients of a query block that both halves read: of both halves, each for 64 dims, or of one
  static constexpr int sharing_warps = kDims == 128 ? 8 : 4;

  uint32_t keys;      // [half][k, v][64, kDims] of the tile
  uint32_t stages;    // [stage][q, do][64, kDims]
  uint32_t weights;   // [slot][half][64 keys x 64 queries]: gradients of the scores, transposed
  uint32_t sums;      // [warpgroup][2][64 x 32] fp32: query gradients on their way out
  uint32_t rows;      // [stage][lse, delta][64]
  uint32_t full, empty;                                // barriers of the stages
  uint32_t keys_full, keys_free, weights_ready, weights_free;  // of the tile, and one for each slot

  // aligned to 1024 bytes
  __device__ __forceinline__ explicit BackwardMemory(uint8_t* memory)
      : keys(shared_address(memory)),
        stages(keys + keys_bytes),
        weights(stages + stage_count * stage_bytes),
        sums(weights + 4 * kBoxBytes),
        rows(sums + 2 * kSumBytes),
        full(rows + stage_count * (2 * kRowBytes + kNoteBytes)),
        empty(full + 8 * stage_count),
        keys_full(empty + 8 * stage_count),
        keys_free(keys_full + 8),
        weights_ready(keys_free + 8),
        weights_free(weights_ready + 16) {}

  __device__ __forceinline__ void init() const {
    for (uint32_t i = 0; i < stage_count; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kBackwardConsumerWarps);
    }
    barrier_init(keys_full, 1);
    barrier_init(keys_free, kBackwardConsumerWarps);
    for (int i = 0; i < 2; ++i) {
      barrier_init(weights_ready + 8 * i, kBackwardConsumerWarps);
      barrier_init(weights_free + 8 * i, sharing_warps);
    }
    barriers_visible_to_copies();
  }

  __device__ __forceinline__ uint32_t k_tile(uint32_t half) const { return keys + half * 2 * tile_bytes; }
  __device__ __forceinline__ uint32_t v_tile(uint32_t half) const { return k_tile(half) + tile_bytes; }
  __device__ __forceinline__ uint32_t q_tile(uint32_t stage) const { return stages + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t do_tile(uint32_t stage) const { return q_tile(stage) + tile_bytes; }
  __device__ __forceinline__ uint32_t lse(uint32_t stage) const { return rows + stage * 2 * kRowBytes; }
  __device__ __forceinline__ uint32_t delta(uint32_t stage) const { return lse(stage) + kRowBytes; }
  __device__ __forceinline__ uint32_t note(uint32_t stage) const { return rows + stage_count * 2 * kRowBytes + stage * kNoteBytes; }
  __device__ __forceinline__ uint32_t weights_box(uint32_t slot, uint32_t half) const {
    return weights + (2 * slot + half) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t sum_box(uint32_t warpgroup, uint32_t box) const { return sums + (2 * warpgroup + box) * kBoxBytes; }
};

// Where a warp stands among so many stages.
template <uint32_t kStages>
struct QueryPlace {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace ds_sparse_ring
