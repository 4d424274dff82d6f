// The ring of stages in shared memory between the warp that copies and the two warpgroups that compute.
//
// A stage is 32 KiB with a note on what it is. A tile is a run of stages: first its queries (both halves), then one stage for
// each 64 keys that either half reads (keys, then values). The next tile's queries end it. So the copies of a tile begin while
// the one before is computed, and its length is known to nobody in advance.
#pragma once

#include "ptx.cuh"
#include "wgmma.cuh"

namespace ds_sparse_ring {

constexpr int kStages = 7;
constexpr uint32_t kTileBytes = 2 * kBoxBytes;  // 64 tokens x 128 dims
constexpr uint32_t kStageBytes = 2 * kTileBytes;
constexpr int kConsumerWarps = 8;

enum NoteFlag : uint32_t {
  kUsed = 1,      // << half: this half reads these keys
  kCausal = 4,    // << half: element-wise causal, its own block
  kMasked = 16,   // columns: `mask` says which keys count
  kQueries = 32,  // the queries of tile `tile`
  kEnd = 64,      // nothing follows
  kBoundary = kQueries | kEnd,
};

struct alignas(32) Note {
  uint32_t flags;
  int tile;
  uint32_t mask[2][2];  // [half][keys 0 to 31, 32 to 63]
};

struct Ring {
  uint32_t stages, full, empty;  // addresses in shared memory
  Note* notes;

  // shared memory that holds it: aligned to 1024 bytes
  static constexpr uint32_t bytes = kStages * (kStageBytes + sizeof(Note) + 16);

  __device__ __forceinline__ explicit Ring(uint8_t* memory)
      : stages(shared_address(memory)),
        full(stages + kStages * (kStageBytes + static_cast<uint32_t>(sizeof(Note)))),
        empty(full + kStages * 8),
        notes(reinterpret_cast<Note*>(memory + kStages * kStageBytes)) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kConsumerWarps);
    }
    barriers_visible_to_copies();
  }
};

// Where a warp stands in the ring.
struct Place {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace ds_sparse_ring
