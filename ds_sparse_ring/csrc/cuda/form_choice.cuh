// Which form of 128 dims a launch takes, by environment variables: to time forms against each other.
#pragma once

#include <cstdlib>

#include "form.cuh"

namespace ds_sparse_ring {

template <int kQueryBuffers, bool kOverlapped>
struct ThreeParts : FormOf<128, 3> {
  static constexpr int query_buffers = kQueryBuffers;
  static constexpr bool overlapped = kOverlapped;
  static constexpr int producer_registers = kQueryBuffers > 0 ? 56 : 32, consumer_registers = kQueryBuffers > 0 ? 152 : 160;
};

inline int chosen(const char* name, int otherwise) {
  const char* given = std::getenv(name);
  return given ? std::atoi(given) : otherwise;
}

// use(form) of the form that is chosen
template <int kHeadSize, class Use>
auto with_form(Use use) {
  if constexpr (kHeadSize != 128) {
    return use(LaunchedForm<kHeadSize>{});
  } else {
    if (chosen("DS_SPARSE_RING_FORWARD_PARTS", 3) == 2) return use(FormOf<128, 2>{});
    const int buffers = chosen("DS_SPARSE_RING_QUERY_BUFFERS", FormOf<128, 3>::query_buffers);
    const bool overlapped = chosen("DS_SPARSE_RING_FORWARD_OVERLAPPED", 0) != 0;
    if (buffers == 1) return overlapped ? use(ThreeParts<1, true>{}) : use(ThreeParts<1, false>{});
    if (buffers == 2) return overlapped ? use(ThreeParts<2, true>{}) : use(ThreeParts<2, false>{});
    return use(FormOf<128, 3>{});
  }
}

}  // namespace ds_sparse_ring
