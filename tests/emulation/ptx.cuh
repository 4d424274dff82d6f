// In place of csrc/cuda/ptx.cuh: barriers in shared memory and the copy engine, with what the hardware would not forgive.
//
// A copy lands after a random delay; until then its place holds NaN. Waiting for ever, arriving too often and boxes that are not
// aligned end the run with a message.
#pragma once

#include <cuda.h>

#include <map>

#include "element.cuh"
#include "warps.h"

namespace ds_sparse_ring {

using emulation::block;

// ---- addresses in shared memory: anything but 0, 1024-byte boundaries where the block's are

constexpr uint32_t kSharedBase = 4096;
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - block.shared) + kSharedBase;
}
inline uint8_t* at_shared(uint32_t address) { return block.shared + (address - kSharedBase); }

// ---- barriers

struct Barrier {
  int arrivals, missing;
  int64_t bytes = 0;
  uint32_t phase = 0;

  void settle() {
    if (missing == 0 && bytes == 0) ++phase, missing = arrivals;
  }
};
inline std::map<uint32_t, Barrier> barriers;

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  barriers[barrier] = Barrier{static_cast<int>(arrivals), static_cast<int>(arrivals)};
}
inline void barriers_visible_to_copies() {}

inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  Barrier& b = barriers.at(barrier);
  if (b.missing <= 0) emulation::fail("arrives too often at a barrier", barrier);
  b.bytes += bytes;
  --b.missing;
  b.settle();
}
inline void barrier_arrive(uint32_t barrier) { barrier_arrive_expect(barrier, 0); }

inline void barrier_wait(uint32_t barrier, uint32_t parity, uint32_t what) {
  for (int turns = 0; (barriers.at(barrier).phase & 1) == parity; ++turns) {
    if (turns > 200000) emulation::fail("waits for ever, stage", what);
    emulation::yield();
  }
}

// ---- the copy engine

struct TensorMap {  // what stands in a CUtensorMap here; strides in elements
  const uint16_t* data;
  int64_t rows, heads, head_stride, row_stride;
};

struct Copy {
  int delay;
  std::function<void()> land;
};
inline std::vector<Copy> copies;

inline void land_copies() {
  for (size_t i = 0; i < copies.size();) {
    if (--copies[i].delay >= 0) {
      ++i;
      continue;
    }
    copies[i].land();
    copies.erase(copies.begin() + static_cast<long>(i));
  }
}

inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

inline void prefetch_map(const CUtensorMap*) {}

inline void copy_box(uint32_t into, const CUtensorMap* map, uint32_t barrier, int dim, int row, int head) {
  constexpr int kBytes = 64 * 64 * 2;
  TensorMap from;
  memcpy(&from, map, sizeof(from));
  if (into % 1024) emulation::fail("a box that is not aligned", into);
  memset(at_shared(into), 0xFF, kBytes);
  copies.push_back({static_cast<int>(block.random() % 40), [=] {
    for (int r = 0; r < 64; ++r)
      for (int d = 0; d < 64; ++d) {
        const int64_t at = row + r;
        const bool inside = at >= 0 && at < from.rows && head < from.heads;
        const uint16_t x = inside ? from.data[head * from.head_stride + at * from.row_stride + dim + d] : 0;
        memcpy(at_shared(swizzled(into + r * 128 + d * 2)), &x, 2);
      }
    Barrier& b = barriers.at(barrier);
    b.bytes -= kBytes;
    b.settle();
  }});
}

inline void fence_async() {}

inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  uint64_t rows[emulation::kLanes];
  memcpy(rows, emulation::exchange(address), sizeof(rows));
  const int lane = block.thread % emulation::kLanes;
  for (int m = 0; m < 4; ++m) memcpy(&r[m], at_shared(static_cast<uint32_t>(rows[8 * m + lane / 4])) + 4 * (lane % 4), 4);
}

template <int N>
void give_registers() {}
template <int N>
void take_registers() {}

// ---- arithmetic

inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }

// rounded to the nearest float16, ties to even; too large: infinity
inline uint16_t to_half(float x) {
  const uint16_t sign = signbit(x) ? 0x8000 : 0;
  if (x != x) return sign | 0x7E00;
  if (x == 0) return sign;
  const int exponent = max(ilogbf(x), -14);
  const int units = isinf(x) ? 1 << 20 : static_cast<int>(nearbyintf(ldexpf(fabsf(x), 10 - exponent)));  // 1024 to 2048
  const int bits = ((exponent + 14) << 10) + units;  // below 1024: subnormal; 2048: the next exponent
  return sign | static_cast<uint16_t>(min(bits, 0x7C00));
}

inline float from_half(uint16_t bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      const int exponent = i >> 10 & 31, mantissa = i & 1023;
      const auto units = static_cast<float>(exponent ? 1024 + mantissa : mantissa);
      float value = ldexpf(units, max(exponent, 1) - 25);
      if (exponent == 31) value = mantissa ? NAN : INFINITY;
      all[i] = i >> 15 ? -value : value;
    }
    return all;
  }();
  return values[bits];
}

inline uint16_t to_element(float x, Element element) {
  if (element == kFloat16) return to_half(x);
  if (x != x) return 0x7FFF;
  uint32_t wide;
  memcpy(&wide, &x, 4);
  return static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
}

inline float from_element(uint16_t bits, Element element) {
  return element == kFloat16 ? from_half(bits) : __int_as_float(static_cast<uint32_t>(bits) << 16);
}

template <Element kElement>
uint32_t pack(float low, float high) {
  return to_element(low, kElement) | static_cast<uint32_t>(to_element(high, kElement)) << 16;
}

}  // namespace ds_sparse_ring
