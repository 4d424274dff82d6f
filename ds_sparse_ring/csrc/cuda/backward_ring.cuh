// Shared memory of the backward kernel, and who waits for what.
//
// A tile is 128 keys of a key/value head (two key blocks, or two tiles of columns), 64 for each of two warpgroups. Its keys and
// values stay while stages pass: the queries and output gradients of one query block, with a note which half uses it. A stage
// without queries says that a tile ends and the next one begins: only then are the keys given back and replaced.
#pragma once

#include "ptx_out.cuh"
#include "wgmma_shared.cuh"

namespace ds_sparse_ring {

constexpr int kQueryStages = 3;
constexpr uint32_t kTileBytes16 = 2 * kBoxBytes;                    // 64 tokens x 128 dims of bfloat16
constexpr uint32_t kQueryStageBytes = 2 * kTileBytes16;             // queries, output gradients
constexpr uint32_t kRowBytes = 64 * 4;                              // lse or delta of a stage
constexpr uint32_t kSumBytes = 2 * kBoxBytes;                       // 64 queries x 64 dims of fp32: two boxes
constexpr int kBackwardConsumerWarps = 8;

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

struct BackwardMemory {
  uint32_t keys;      // [half][k, v][64 x 128] of the tile
  uint32_t stages;    // [stage][q, do][64 x 128]
  uint32_t weights;   // [slot][half][64 keys x 64 queries]: gradients of the scores, transposed
  uint32_t sums;      // [warpgroup][2][64 x 32] fp32: query gradients on their way out
  uint32_t rows;      // [stage][lse, delta][64]
  uint32_t full, empty;                                // barriers of the stages
  uint32_t keys_full, keys_free, weights_ready, weights_free;  // of the tile, and one for each slot

  static constexpr uint32_t tiles_bytes = 4 * kTileBytes16 + kQueryStages * kQueryStageBytes + 4 * kBoxBytes + 2 * kSumBytes;
  static constexpr uint32_t bytes = tiles_bytes + kQueryStages * (2 * kRowBytes + kNoteBytes + 16) + 6 * 8;

  // aligned to 1024 bytes
  __device__ __forceinline__ explicit BackwardMemory(uint8_t* memory)
      : keys(shared_address(memory)),
        stages(keys + 4 * kTileBytes16),
        weights(stages + kQueryStages * kQueryStageBytes),
        sums(weights + 4 * kBoxBytes),
        rows(sums + 2 * kSumBytes),
        full(rows + kQueryStages * (2 * kRowBytes + kNoteBytes)),
        empty(full + 8 * kQueryStages),
        keys_full(empty + 8 * kQueryStages),
        keys_free(keys_full + 8),
        weights_ready(keys_free + 8),
        weights_free(weights_ready + 16) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kQueryStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kBackwardConsumerWarps);
    }
    barrier_init(keys_full, 1);
    barrier_init(keys_free, kBackwardConsumerWarps);
    for (int i = 0; i < 2; ++i) {
      barrier_init(weights_ready + 8 * i, kBackwardConsumerWarps);
      barrier_init(weights_free + 8 * i, kBackwardConsumerWarps);
    }
    barriers_visible_to_copies();
  }

  __device__ __forceinline__ uint32_t k_tile(uint32_t half) const { return keys + half * 2 * kTileBytes16; }
  __device__ __forceinline__ uint32_t v_tile(uint32_t half) const { return k_tile(half) + kTileBytes16; }
  __device__ __forceinline__ uint32_t q_tile(uint32_t stage) const { return stages + stage * kQueryStageBytes; }
  __device__ __forceinline__ uint32_t do_tile(uint32_t stage) const { return q_tile(stage) + kTileBytes16; }
  __device__ __forceinline__ uint32_t lse(uint32_t stage) const { return rows + stage * 2 * kRowBytes; }
  __device__ __forceinline__ uint32_t delta(uint32_t stage) const { return lse(stage) + kRowBytes; }
  __device__ __forceinline__ uint32_t note(uint32_t stage) const { return rows + kQueryStages * 2 * kRowBytes + stage * kNoteBytes; }
  __device__ __forceinline__ uint32_t weights_box(uint32_t slot, uint32_t half) const {
    return weights + (2 * slot + half) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t sum_box(uint32_t warpgroup, uint32_t box) const { return sums + (2 * warpgroup + box) * kBoxBytes; }
};

// Where a warp stands among the stages.
struct QueryPlace {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kQueryStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace ds_sparse_ring
