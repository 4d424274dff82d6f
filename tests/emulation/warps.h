// A thread block on one CPU core: threads are fibers, which run in turns until they wait for each other.
//
// What a warp does together (votes, shuffles) waits until all of its lanes have come; warps run at uneven, seeded paces.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline

using std::max;
using std::min;

namespace emulation {

constexpr int kThreads = 640, kLanes = 32;  // the most threads

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};

struct Warp {  // what its lanes exchange; two rounds, since some lanes may be in the next one already
  int arrived = 0;
  uint64_t round = 0, given[kLanes], exchanged[2][kLanes];
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<uint8_t> memory;
  uint8_t* shared;  // aligned as the kernel aligns it
  int thread = 0;   // that runs
  uint64_t seed = 1;
  std::string failure;  // what ended the last run

  uint32_t random() {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(seed >> 33);
  }
};

inline Block block;

inline void yield() { swapcontext(&block.fibers[block.thread].context, &block.scheduler); }

// every lane's value, once all have come
inline const uint64_t* exchange(uint64_t value) {
  Warp& warp = block.warps[block.thread / kLanes];
  const uint64_t round = warp.round;
  warp.given[block.thread % kLanes] = value;
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    memcpy(warp.exchanged[round % 2], warp.given, sizeof(warp.given));
    ++warp.round;
  } else {
    while (warp.round == round) yield();
  }
  return warp.exchanged[round % 2];
}

// runs `body` in each of so many threads; `after_turn` runs after each turn of all warps
template <class AfterTurn>
void run(int threads, void (*body)(), const std::function<bool(int)>& takes_part, AfterTurn after_turn) {
  block.warps.assign(threads / kLanes, {});
  block.fibers.resize(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.done = !takes_part(i);
    fiber.stack.resize(64 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &block.scheduler;
    makecontext(&fiber.context, body, 0);
  }
  block.failure.clear();
  const int warps = threads / kLanes;
  while (block.failure.empty() &&
         std::any_of(block.fibers.begin(), block.fibers.end(), [](const Fiber& fiber) { return !fiber.done; })) {
    const int first = block.random() % warps;
    for (int w = 0; w < warps; ++w) {
      if (block.random() % 3 == 0) continue;
      for (int lane = 0; lane < kLanes; ++lane) {
        block.thread = (first + w) % warps * kLanes + lane;
        Fiber& fiber = block.fibers[block.thread];
        if (!fiber.done) swapcontext(&block.scheduler, &fiber.context);
      }
    }
    after_turn();
  }
}

struct Index {
  int x;
};

// ends the run
[[noreturn]] inline void fail(const std::string& why, uint32_t what) {
  block.failure = "thread " + std::to_string(block.thread) + ": " + why + ", " + std::to_string(what);
  for (;;) yield();
}

template <class T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::block.thread})

// ---- what CUDA C++ knows by itself

inline void __syncwarp() { emulation::exchange(0); }

template <class T>
T __shfl_sync(uint32_t, T value, int source) {
  const uint64_t bits = emulation::exchange(emulation::bits_of(value))[source];
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  return __shfl_sync(mask, value, (emulation::block.thread % emulation::kLanes) ^ lanes);
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  const uint64_t* values = emulation::exchange(value);
  uint32_t bits = 0;
  for (int i = 0; i < emulation::kLanes; ++i) bits |= static_cast<uint32_t>(values[i] & 1) << i;
  return bits;
}

inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  const uint64_t* values = emulation::exchange(value);
  uint32_t bits = 0;
  for (int i = 0; i < emulation::kLanes; ++i) bits |= static_cast<uint32_t>(values[i]);
  return bits;
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int by) { return by ? (high << by) | (low >> (32 - by)) : high; }

inline float __int_as_float(uint32_t x) {
  float value;
  memcpy(&value, &x, 4);
  return value;
}

inline int atomicAdd(int32_t* at, int by) {
  const int old = *at;
  *at += by;
  return old;
}

inline uint64_t atomicOr(unsigned long long* at, uint64_t with) {
  const uint64_t old = *at;
  *at |= with;
  return old;
}

inline int atomicMax(int32_t* at, int with) {
  const int old = *at;
  if (with > old) *at = with;
  return old;
}

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
