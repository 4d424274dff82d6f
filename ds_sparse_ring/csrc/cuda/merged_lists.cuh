// Two or three sorted lists walked as one, by a warp: of two, lanes 0 to 15 read the first and lanes 16 to 31 the other; of three,
// eight lanes each.
#pragma once

#include <stdint.h>

#include "ptx_out.cuh"

namespace ds_sparse_ring {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
template <int kLists>
constexpr int kListLanes = kLists == 2 ? 16 : 8;
constexpr int kBehindAll = 1 << 30;

// Where the first value that is not below `least` stands in ascending values[low, high), of each of two lists its own.
__device__ __forceinline__ int first_not_below(const int32_t* values, int low, int high, int least) {
  constexpr int kLanes = kListLanes<2>;
  const int lane = static_cast<int>(thread_now() % 32), turn = lane % kLanes;
  while (__any_sync(kAllLanes, low < high)) {  // a sixteenth is left each time
    const int step = (high - low) / kLanes + 1, last = low + step * (turn + 1) - 1;
    const uint32_t below = __ballot_sync(kAllLanes, last < high && values[last] < least);
    low += step * __popc(below >> (lane & kLanes) & 0xFFFF);
    high = min(high, low + step - 1);
  }
  return low;
}

// Calls use(x, lists) for each x of any list, in order; bit h: it stands in list h. entry(i): an ascending list, the lane's, from
// number `first` on, kBehindAll behind its end. own: comes before it; negative: nothing does.
template <int kLists, class Entry, class Use>
__device__ __forceinline__ void for_each_of_any(int own, int first, Entry entry, Use use) {
  constexpr int kLanes = kListLanes<kLists>, kTurns = kLanes - 1;  // a lane has the numbers of its turn, modulo kLanes
  const int lane = static_cast<int>(thread_now() % 32), turn = lane & kTurns;
  const int begin = own >= 0 ? first - 1 : first, number = (begin & ~kTurns) + turn;
  int here = number < first ? own : entry(number);
  // where the lists are, and all that follows from it, is the same in all lanes, as the compiler knows by the shuffles
  int at[kLists];
#pragma unroll
  for (int h = 0; h < kLists; ++h) at[h] = __shfl_sync(kAllLanes, begin, kLanes * h);
  for (;;) {
    int front[kLists], x = kBehindAll;
#pragma unroll
    for (int h = 0; h < kLists; ++h) x = min(x, front[h] = __shfl_sync(kAllLanes, here, kLanes * h | (at[h] & kTurns)));
    if (x == kBehindAll) return;
    uint32_t lists = 0, ended = 0;
#pragma unroll
    for (int h = 0; h < kLists; ++h)
      if (front[h] == x) {
        lists |= 1u << h;
        if ((++at[h] & kTurns) == 0) ended |= 1u << h;
      }
    if (ended >> lane / kLanes & 1) {
      int from = at[0];
#pragma unroll
      for (int h = 1; h < kLists; ++h)
        if (lane / kLanes == h) from = at[h];
      here = entry(from + turn);
    }
    use(x, lists);
  }
}

}  // namespace ds_sparse_ring
