// A tile of the kernel that marks wanted keys, the order of its key blocks, and the ring in shared memory that they come through.
//
// A tile is one query block of up to four query heads of a KV head. Its walk depends on the query block alone: its own block, the
// document's first one, then from near to far, and the first one again. So both sides of the ring know it, and no note goes with
// a stage.
#pragma once

#include "ptx.cuh"
#include "ring.cuh"
#include "wanted.cuh"
#include "wgmma.cuh"

namespace ds_sparse_ring {

struct WantedTile {
  int local, kv_head, first_head, heads;  // query block of this rank, its heads
  int own, first;                         // global blocks

  // Tiles of one KV head after the other, late query blocks, which have most to read, first; those that read the same keys beside
  // each other.
  __device__ __forceinline__ WantedTile(const WantedProblem& p, int number) {
    const int of_head = p.q_blocks * p.tiles, rest = number % of_head, group = p.heads / p.kv_heads;
    const int skipped = rest % p.tiles * p.tile_heads;
    kv_head = number / of_head;
    local = p.q_blocks - 1 - rest / p.tiles;
    first_head = kv_head * group + skipped;
    heads = min(p.tile_heads, group - skipped);
    own = static_cast<int>(p.block[local]), first = static_cast<int>(p.first[local]);
  }

  // some key is outside of the window, and some row may want it
  __device__ __forceinline__ bool marks(const WantedProblem& p) const { return own - first >= p.window && p.valid[local] > 0; }

  __device__ __forceinline__ int steps() const { return own - first + 2; }

  __device__ __forceinline__ int block_of(int step) const {
    if (step == 0) return own;
    return step == 1 || step == steps() - 1 ? first : own - step + 1;
  }
};

template <int kHeadSize>
struct KeyRing {
  static constexpr uint32_t stage_bytes = kHeadSize / 64 * kBoxBytes;  // 64 keys
  static constexpr uint32_t stage_count = 12;
  static constexpr uint32_t bytes = stage_count * (stage_bytes + 16);  // aligned to 1024

  uint32_t stages, full, empty;  // addresses in shared memory

  __device__ __forceinline__ explicit KeyRing(uint8_t* memory)
      : stages(shared_address(memory)), full(stages + stage_count * stage_bytes), empty(full + stage_count * 8) {}

  __device__ __forceinline__ void init(int readers) const {
    for (uint32_t i = 0; i < stage_count; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, static_cast<uint32_t>(readers));
    }
    barriers_visible_to_copies();
  }
};

// What one thread does: copies of all key blocks of a tile, as far ahead as stages are free.
template <int kHeadSize>
__device__ __forceinline__ void copy_keys(const WantedArguments& a, const WantedTile& tile, const KeyRing<kHeadSize>& ring) {
  Place<KeyRing<kHeadSize>::stage_count> place;
  const int steps = tile.steps();
  for (int step = 0; step < steps; ++step) {
    barrier_wait(ring.empty + 8 * place.stage, place.phase ^ 1, place.stage);
    const uint32_t into = ring.stages + place.stage * ring.stage_bytes, full = ring.full + 8 * place.stage;
    barrier_arrive_expect(full, ring.stage_bytes);
#pragma unroll
    for (int box = 0; box < kHeadSize / 64; ++box)
      copy_box(into + box * kBoxBytes, &a.k, full, 64 * box, tile.block_of(step) * 64, tile.kv_head);
    place.advance();
  }
}

}  // namespace ds_sparse_ring
