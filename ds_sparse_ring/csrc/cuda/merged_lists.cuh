// Two sorted lists walked as one, by a warp: lanes 0 to 15 read the list of a tile's first half, lanes 16 to 31 that of the other.
#pragma once

#include <stdint.h>

#include "ptx_out.cuh"

namespace ds_sparse_ring {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int kHalfLanes = 16;
constexpr int kBehindAll = 1 << 30;

// Where the first value that is not below `least` stands in ascending values[low, high), of each half's own.
__device__ __forceinline__ int first_not_below(const int32_t* values, int low, int high, int least) {
  const int lane = static_cast<int>(thread_now() % 32), turn = lane % kHalfLanes;
  while (__any_sync(kAllLanes, low < high)) {  // a sixteenth is left each time
    const int step = (high - low) / kHalfLanes + 1, last = low + step * (turn + 1) - 1;
    const uint32_t below = __ballot_sync(kAllLanes, last < high && values[last] < least);
    low += step * __popc(below >> (lane & kHalfLanes) & 0xFFFF);
    high = min(high, low + step - 1);
  }
  return low;
}

// Calls use(x, halves) for each x of either list, in order; bit h: it stands in the list of half h. entry(i): an ascending list
// of the lane's half from number `first` on, kBehindAll behind its end. own: comes before it; negative: nothing does.
template <class Entry, class Use>
__device__ __forceinline__ void for_each_of_either(int own, int first, Entry entry, Use use) {
  constexpr int kTurns = kHalfLanes - 1;  // a lane has the numbers of its turn, modulo 16
  const int lane = static_cast<int>(thread_now() % 32), turn = lane & kTurns;
  const int begin = own >= 0 ? first - 1 : first, number = (begin & ~kTurns) + turn;
  int here = number < first ? own : entry(number);
  // where both lists are, and all that follows from it, is the same in all lanes, as the compiler knows by the shuffles
  int at[2] = {__shfl_sync(kAllLanes, begin, 0), __shfl_sync(kAllLanes, begin, kHalfLanes)};
  for (;;) {
    const int front[2] = {__shfl_sync(kAllLanes, here, at[0] & kTurns), __shfl_sync(kAllLanes, here, kHalfLanes | (at[1] & kTurns))};
    const int x = min(front[0], front[1]);
    if (x == kBehindAll) return;
    uint32_t halves = 0, ended = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (front[h] == x) {
        halves |= 1u << h;
        if ((++at[h] & kTurns) == 0) ended |= 1u << h;
      }
    if (ended >> lane / kHalfLanes & 1) here = entry((lane < kHalfLanes ? at[0] : at[1]) + turn);
    use(x, halves);
  }
}

}  // namespace ds_sparse_ring
