// The ring of stages in shared memory between the warp that copies and the warpgroups that compute, one for each part of a tile.
//
// A stage holds 128 rows (32 KiB at 128 dims) with a note on what they are. A tile is a run of stages: first its queries (all
// parts), then one stage for each 64 keys that some part reads (keys, then values). The next tile's queries end it. So the
// copies of a tile begin while the one before is computed, and its length is known to nobody in advance.
//
// Queries go from their stage to registers. Where the registers do not hold them, too, they stay in a buffer beside the ring, and
// their stage is but a note.
#pragma once

#include "form.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace ds_sparse_ring {

constexpr uint32_t kSharedBytes = 228 * 1024, kReservedBytes = 1024;  // of a multiprocessor, and for each block of it
constexpr uint32_t kMostSharedBytes = kSharedBytes - kReservedBytes;     // of a block
constexpr uint32_t kAlignment = 1024;              // of a swizzled box

enum NoteFlag : uint32_t {
  kUsed = 1,                        // << part: this part reads these keys
  kCausal = kUsed << kMostParts,    // << part: element-wise causal, its own block
  kMasked = kCausal << kMostParts,  // columns: `mask` says which keys count
  kQueries = kMasked << 1,          // the queries of tile `tile`
  kEnd = kMasked << 2,              // nothing follows
  kBoundary = kQueries | kEnd,
};

struct alignas(32) Note {
  uint32_t flags;
  int tile;
  uint32_t mask[kMostParts][2];  // [part][keys 0 to 31, 32 to 63]
};

template <class Form>
struct Ring {
  static constexpr uint32_t tile_bytes = Form::head_size / 64 * kBoxBytes, stage_bytes = 2 * tile_bytes;
  static constexpr uint32_t query_bytes = Form::parts * tile_bytes;  // of a buffer, which has two barriers
  static constexpr uint32_t query_buffers = Form::query_buffers;
  static constexpr uint32_t stage_count = (kSharedBytes / Form::blocks - kReservedBytes - query_buffers * (query_bytes + 16)) /
                                          (stage_bytes + static_cast<uint32_t>(sizeof(Note)) + 16);

  uint32_t stages, full, empty;  // addresses in shared memory
  uint32_t queries, queries_full, queries_empty;
  Note* notes;

  // shared memory that holds it: aligned to 1024 bytes
  static constexpr uint32_t bytes = query_buffers * (query_bytes + 16) + stage_count * (stage_bytes + sizeof(Note) + 16);

  __device__ __forceinline__ explicit Ring(uint8_t* memory)
      : stages(shared_address(memory) + query_buffers * query_bytes),
        full(stages + stage_count * (stage_bytes + static_cast<uint32_t>(sizeof(Note)))),
        empty(full + stage_count * 8),
        queries(shared_address(memory)),
        queries_full(empty + stage_count * 8),
        queries_empty(queries_full + query_buffers * 8),
        notes(reinterpret_cast<Note*>(memory + query_buffers * query_bytes + stage_count * stage_bytes)) {}

  __device__ __forceinline__ void init() const {
    for (uint32_t i = 0; i < stage_count; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * Form::parts);
    }
    if constexpr (query_buffers > 0) {
      for (uint32_t i = 0; i < query_buffers; ++i) {
        barrier_init(queries_full + 8 * i, 1);
        barrier_init(queries_empty + 8 * i, 4 * Form::parts);
      }
    }
    barriers_visible_to_copies();
  }
};

// Where a warp stands in a ring of so many stages.
template <uint32_t kStages>
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
