// The warp that walks the index and copies: queries, keys and values of one tile after the other, as far ahead as stages are
// free.
#pragma once

#include "active_blocks.cuh"
#include "ring.cuh"
#include "tile_scheduler.cuh"

namespace ds_sparse_ring {

template <class Form>
struct Producer {
  using Stages = Ring<Form>;
  using FormTile = Tile<Form::parts>;

  const ForwardArguments& a;
  const Stages& ring;
  Place<Stages::stage_count> place;
  Place<Stages::query_buffers> buffer;  // for the next tile's queries
  bool leader;  // one lane writes notes and starts copies

  __device__ __forceinline__ Producer(const ForwardArguments& arguments, const Stages& r)
      : a(arguments), ring(r), leader(threadIdx.x % 32 == 0) {}

  // waits for a free stage; its address in shared memory
  __device__ __forceinline__ uint32_t acquire() {
    barrier_wait(ring.empty + 8 * place.stage, place.phase ^ 1, place.stage);
    return ring.stages + place.stage * Stages::stage_bytes;
  }

  __device__ __forceinline__ uint32_t barrier() const { return ring.full + 8 * place.stage; }

  __device__ __forceinline__ void copy_tile(uint32_t into, const CUtensorMap* map, uint32_t arrival, int row, int head) const {
#pragma unroll
    for (int box = 0; box < Form::head_size / 64; ++box) copy_box(into + box * kBoxBytes, map, arrival, 64 * box, row, head);
  }

  // of parts first to last - 1
  __device__ __forceinline__ void copy_queries(uint32_t into, uint32_t arrival, const FormTile& tile, int first, int last) const {
    if (!leader) return;
    barrier_arrive_expect(arrival, (last - first) * Stages::tile_bytes);
#pragma unroll
    for (int h = first; h < last; ++h)  // what lies behind the last query reads as 0
      copy_tile(into + (h - first) * Stages::tile_bytes, &a.q, arrival, tile.part[h].block * kBlock, tile.part[h].head);
  }

  // a free stage with the note that a tile begins
  __device__ __forceinline__ uint32_t begin_tile(int number) {
    const uint32_t stage = acquire();
    if (leader) {
      ring.notes[place.stage].flags = kQueries;
      ring.notes[place.stage].tile = number;
    }
    return stage;
  }

  __device__ __forceinline__ void push_queries(int number, const FormTile& tile) {
    if constexpr (Stages::query_buffers > 0) {
      begin_tile(number);
      if (leader) barrier_arrive(barrier());  // at once: the note ends the tile before, which may hold the buffer
      barrier_wait(ring.queries_empty + 8 * buffer.stage, buffer.phase ^ 1, buffer.stage | 0x200);
      const uint32_t into = ring.queries + buffer.stage * Stages::query_bytes;
      copy_queries(into, ring.queries_full + 8 * buffer.stage, tile, 0, Form::parts);
      buffer.advance();
      place.advance();
    } else {
#pragma unroll
      for (int first = 0; first < Form::parts; first += 2) {
        const uint32_t stage = begin_tile(number);
        copy_queries(stage, barrier(), tile, first, first + 2 < Form::parts ? first + 2 : Form::parts);
        place.advance();
      }
    }
  }

  __device__ __forceinline__ void push_end() {
    acquire();
    if (leader) {
      ring.notes[place.stage].flags = kEnd;
      barrier_arrive(barrier());
    }
    place.advance();
  }

  __device__ __forceinline__ void push_keys(const CUtensorMap* k, const CUtensorMap* v, int row, int head, uint32_t flags,
                                            const uint32_t (*mask)[2]) {
    const uint32_t stage = acquire();
    if (leader) {
      Note& note = ring.notes[place.stage];
      note.flags = flags;
      if (mask) {
#pragma unroll
        for (int i = 0; i < 2 * Form::parts; ++i) note.mask[i / 2][i % 2] = mask[i / 2][i % 2];
      }
      barrier_arrive_expect(barrier(), Stages::stage_bytes);
      copy_tile(stage, k, barrier(), row, head);
      copy_tile(stage + Stages::tile_bytes, v, barrier(), row, head);
    }
    place.advance();
  }

  __device__ __forceinline__ int next_tile() const {
    int number = 0;
    if (leader) number = atomicAdd(a.problem.next_tile, 1);
    return __shfl_sync(kAllLanes, number, 0);
  }

  __device__ __forceinline__ void run() {
    const ForwardProblem& p = a.problem;
    const TileScheduler<Form::parts> scheduler(p);
    for (int number = next_tile(); number < scheduler.tiles;) {
      const FormTile tile = scheduler.tile_of(number);
      push_queries(number, tile);
      number = next_tile();
      const auto push = [&](int key, uint32_t flags) { push_keys(&a.k, &a.v, key * kBlock, tile.kv_head, flags, nullptr); };
      if (p.tables.list_ptr) {
        for_each_listed_block(p, tile, push);
        continue;
      }
      PartReads part[Form::parts];
#pragma unroll
      for (int h = 0; h < Form::parts; ++h) part[h] = reads_of(p, tile.part[h]);
      for_each_block(p, part, push);
      if (p.tables.column_ptr)
        for_each_column_tile(p, part, [&](int64_t row, uint32_t flags, const uint32_t (&mask)[Form::parts][2]) {
          push_keys(&a.column_k, &a.column_v, static_cast<int>(row), 0, flags, mask);
        });
    }
    push_end();
  }
};

}  // namespace ds_sparse_ring
