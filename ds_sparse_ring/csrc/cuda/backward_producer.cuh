// The warp that walks the index and copies: keys and values of one tile after the other, then the query blocks that read them.
#pragma once

#include "readers.cuh"

namespace ds_sparse_ring {

template <int kDims>
struct QueryProducer {
  using Memory = BackwardMemory<kDims>;

  const BackwardArguments& a;
  const Memory& memory;
  QueryPlace<Memory::stage_count> place;
  uint32_t keys_phase = 0;
  bool leader;  // one lane writes notes and starts copies

  __device__ __forceinline__ QueryProducer(const BackwardArguments& arguments, const Memory& m)
      : a(arguments), memory(m), leader(threadIdx.x % 32 == 0) {}

  __device__ __forceinline__ void acquire() { barrier_wait(memory.empty + 8 * place.stage, place.phase ^ 1, place.stage); }
  __device__ __forceinline__ uint32_t barrier() const { return memory.full + 8 * place.stage; }

  __device__ __forceinline__ void copy_tile(uint32_t into, const CUtensorMap* map, uint32_t arrives, int row, int head) const {
    copy_box(into, map, arrives, 0, row, head);
    if constexpr (kDims == 128) copy_box(into + kBoxBytes, map, arrives, 64, row, head);
  }

  __device__ __forceinline__ void push_keys(int number, const CUtensorMap* k, const CUtensorMap* v, int row, int head) {
    acquire();
    if (leader) {
      store_word(memory.note(place.stage) + kNoteFlags, kTileBegins);
      store_word(memory.note(place.stage) + kNoteBlock, number);
      barrier_arrive(barrier());
    }
    barrier_wait(memory.keys_free, keys_phase ^ 1, 0x200);
    keys_phase ^= 1;
    if (leader) {
      barrier_arrive_expect(memory.keys_full, Memory::keys_bytes);
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // what lies behind the last key reads as 0
        copy_tile(memory.k_tile(h), k, memory.keys_full, row + h * kBlock, head);
        copy_tile(memory.v_tile(h), v, memory.keys_full, row + h * kBlock, head);
      }
    }
    place.advance();
  }

  __device__ __forceinline__ void push_end() {
    acquire();
    if (leader) {
      store_word(memory.note(place.stage) + kNoteFlags, kNoMore);
      barrier_arrive(barrier());
    }
    place.advance();
  }

  __device__ __forceinline__ void push_queries(int head, int block, uint32_t flags, const uint32_t (*mask)[2]) {
    acquire();
    if (leader) {
      const BackwardProblem& p = a.problem;
      const uint32_t note = memory.note(place.stage);
      store_word(note + kNoteFlags, flags);
      store_word(note + kNoteHead, head - p.first_head), store_word(note + kNoteBlock, block);
      if (mask) {
#pragma unroll
        for (int i = 0; i < 4; ++i) store_word(note + kNoteMask + 4 * i, mask[i / 2][i % 2]);
      }
      barrier_arrive_expect(barrier(), Memory::stage_bytes + 2 * kRowBytes);
      copy_tile(memory.q_tile(place.stage), &a.q, barrier(), block * kBlock, head);
      copy_bytes(memory.lse(place.stage), p.lse + head * p.lse_head + block * kBlock, kRowBytes, barrier());
      copy_tile(memory.do_tile(place.stage), &a.d_o, barrier(), block * kBlock, head);
      copy_bytes(memory.delta(place.stage), p.delta + head * p.delta_head + block * kBlock, kRowBytes, barrier());
    }
    place.advance();
  }

  __device__ __forceinline__ int next_tile() const {
    int number = 0;
    if (leader) number = atomicAdd(a.problem.next_tile, 1);
    return __shfl_sync(kAllLanes, number, 0);
  }

  __device__ __forceinline__ void push_columns(int number, const KeyTile& tile) {
    const BackwardProblem& p = a.problem;
    const int pattern = tile.row % p.tables.patterns, segment = tile.row / p.tables.patterns;
    const int first = max(pattern * p.heads_per_pattern, p.first_head);
    const int heads = min((pattern + 1) * p.heads_per_pattern, p.last_head) - first;
    const int from = p.tables.segments[3 * segment], blocks = p.tables.segments[3 * segment + 1] - from;
    if (heads <= 0 || blocks <= 0) return;
    push_keys(number, &a.column_k, &a.column_v, static_cast<int>(tile.first), 0);
    // Sums have no order: begin where another block is that reads the same queries, so that both find them in L2.
    volatile int32_t* meeting = p.next_tile + 2 + tile.row % kMeetings;
    const int place = __shfl_sync(kAllLanes, *meeting, 0), block = from + place % blocks;
    int head = place / blocks % heads;
    for (int i = 0; i < heads; ++i) {
      for_each_column_reader(p, tile, block, [&](int query, uint32_t flags, const uint32_t (&mask)[2][2]) {
        if (leader) *meeting = head * blocks + query - from;
        push_queries(first + head, query, flags, mask);
      });
      if (++head == heads) head = 0;
    }
  }

  __device__ __forceinline__ void push_blocks(int number, const KeyTile& tile) {
    const BackwardProblem& p = a.problem;
    push_keys(number, &a.k, &a.v, tile.key * kBlock, tile.kv_head);
    const int last = min(tile.key + 1, p.k_blocks - 1);
    const int from = min(p.k_segments[2 * tile.key], p.k_segments[2 * last]);
    const int to = max(p.k_segments[2 * tile.key + 1], p.k_segments[2 * last + 1]);
    const int group = p.heads / p.kv_heads, chunks = (to - from) * group;
    // Sums have no order: begin where the block is that has come farthest, so that all read the same queries while L2 has them.
    const int skipped = from * group;
    int place = __shfl_sync(kAllLanes, *static_cast<volatile int32_t*>(p.next_tile + 1), 0);
    int chunk = place % max(to * group, 1) - skipped;
    if (chunk < 0) place -= chunk, chunk = 0;
    for (int i = 0; i < chunks; ++i) {
      if (leader) atomicMax(p.next_tile + 1, place);
      const int head = tile.kv_head * group + chunk % group;
      const int segment = from + chunk / group, pattern = head / p.heads_per_pattern;
      const auto push = [&](int block, uint32_t flags) { push_queries(head, block, flags, nullptr); };
      if (p.tables.reader_ptr)
        for_each_listed_reader(p, tile.key, segment, pattern, push);
      else
        for_each_reader(p, tile.key, segment, pattern, push);
      ++place;
      if (++chunk == chunks) chunk = 0, place += skipped;
    }
  }

  __device__ __forceinline__ void run() {
    const int tiles = key_tiles(a.problem);
    for (int number = next_tile(); number < tiles; number = next_tile()) {
      const KeyTile tile = key_tile_of(a.problem, number);
      if (!tile.columns)
        push_blocks(number, tile);
      else if (tile.row >= 0)
        push_columns(number, tile);
    }
    push_end();
  }
};

}  // namespace ds_sparse_ring
