// In place of csrc/cuda/ptx_out.cuh: stores, additions by the copy engine, barriers among a few warps.
//
// An addition reads shared memory after a random delay: what is overwritten too early is added.
#pragma once

#include "ptx.cuh"

namespace ds_sparse_ring {

inline uint32_t thread_now() { return static_cast<uint32_t>(block.thread); }
inline uint32_t uniform(uint32_t x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

struct NamedBarrier {
  int arrived = 0;
  uint64_t round = 0;
};
inline NamedBarrier named_barriers[16];

inline void sync_warps(uint32_t id, int threads) {
  if (id < 1 || id > 15) emulation::fail("no such barrier", id);
  NamedBarrier& b = named_barriers[id];
  const uint64_t round = b.round;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.round;
  }
  for (int turns = 0; b.round == round; ++turns) {
    if (turns > 200000) emulation::fail("waits for ever at barrier", id);
    emulation::yield();
  }
}

inline void arrive_warps(uint32_t id, int threads) {
  if (id < 1 || id > 15) emulation::fail("no such barrier", id);
  NamedBarrier& b = named_barriers[id];
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.round;
  }
}

template <class T>
T load_shared(uint32_t address) {
  T x;
  memcpy(&x, at_shared(address), sizeof(T));
  return x;
}
inline float2 load_pair(uint32_t address) { return load_shared<float2>(address); }
inline uint32_t load_word(uint32_t address) { return load_shared<uint32_t>(address); }
inline void store_word(uint32_t address, uint32_t x) { memcpy(at_shared(address), &x, 4); }
inline void store_float(uint32_t address, float x) { memcpy(at_shared(address), &x, 4); }

inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  uint64_t rows[emulation::kLanes];
  memcpy(rows, emulation::exchange(address), sizeof(rows));
  const int lane = block.thread % emulation::kLanes;
  for (int m = 0; m < 4; ++m) memcpy(at_shared(static_cast<uint32_t>(rows[8 * m + lane / 4])) + 4 * (lane % 4), &r[m], 4);
}

inline void copy_bytes(uint32_t into, const void* from, uint32_t bytes, uint32_t barrier) {
  if (into % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulation::fail("a copy that is not aligned", into);
  memset(at_shared(into), 0xFF, bytes);
  copies.push_back({static_cast<int>(block.random() % 40), [=] {
    memcpy(at_shared(into), from, bytes);
    Barrier& b = barriers.at(barrier);
    b.bytes -= bytes;
    b.settle();
  }});
}

inline void add_pair(float* to, float x, float y) {
  if (reinterpret_cast<uintptr_t>(to) % 8) emulation::fail("an addition that is not aligned", 0);
  to[0] += x;
  to[1] += y;
}

inline int additions[emulation::kThreads];  // of a thread, on their way

inline void add_box(const CUtensorMap* map, uint32_t from, int dim, int row, int head) {
  TensorMap into;
  memcpy(&into, map, sizeof(into));
  if (from % 1024) emulation::fail("a box that is not aligned", from);
  int* mine = &additions[block.thread];
  ++*mine;
  copies.push_back({static_cast<int>(block.random() % 60), [=] {
    auto* sums = reinterpret_cast<float*>(const_cast<uint16_t*>(into.data));
    for (int r = 0; r < 64; ++r)
      for (int d = 0; d < 32; ++d)
        if (row + r < into.rows && head < into.heads)
          sums[head * into.head_stride + (row + r) * into.row_stride + dim + d] += load_shared<float>(swizzled(from + r * 128 + d * 4));
    --*mine;
  }});
}

inline void wait_added_read() {
  while (additions[block.thread]) emulation::yield();
}
inline void wait_added() { wait_added_read(); }

}  // namespace ds_sparse_ring
