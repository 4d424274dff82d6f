// The forms of the forward kernel: of how many parts a tile is, and how a block computes it.
//
// A part is 64 query rows, those of one warpgroup. The warp that copies comes behind the warpgroups that compute.
#pragma once

namespace ds_sparse_ring {

constexpr int kMostParts = 3;

template <int kHeadSize, int kParts>
struct FormOf;

// A step's exponentials take as long as its products, and two warpgroups spend more time waiting for either than working: two
// blocks share a multiprocessor, and none of their four warpgroups overlaps anything by itself.
template <>
struct FormOf<64, 2> {
  static constexpr int head_size = 64, parts = 2;
  static constexpr int blocks = 2;           // of a multiprocessor
  static constexpr int query_buffers = 2;    // beside the ring, in shared memory; 0: queries go from stages to registers
  static constexpr bool overlapped = false;  // a warpgroup's softmax beside its own products
  static constexpr int threads = parts * 128 + 32;
  static constexpr int producer_registers = 0, consumer_registers = 0;  // as compiled: at most 96, of 20 warps' 65536
};

// The registers hold one block, and the copying warp has a warpgroup's threads, without which registers cannot be moved.
template <>
struct FormOf<128, 2> {
  static constexpr int head_size = 128, parts = 2;
  static constexpr int blocks = 1;
  static constexpr int query_buffers = 0;
  static constexpr bool overlapped = true;
  static constexpr int threads = (parts + 1) * 128;
  static constexpr int producer_registers = 56, consumer_registers = 224;  // 128 * (56 + 2 * 224) of 65536
};

// One copy of keys and values serves up to 192 rows. The registers hold a warpgroup's queries, sums and scores, but not the
// weights of one step beside the scores of the next one; while a warpgroup waits, the two others compute.
template <>
struct FormOf<128, 3> {
  static constexpr int head_size = 128, parts = 3;
  static constexpr int blocks = 1;
  static constexpr int query_buffers = 0;
  static constexpr bool overlapped = false;
  static constexpr int threads = (parts + 1) * 128;
  static constexpr int producer_registers = 32, consumer_registers = 160;  // 128 * (32 + 3 * 160) of 65536
};

// the form of a launch
template <int kHeadSize>
using LaunchedForm = FormOf<kHeadSize, kHeadSize == 128 ? 3 : 2>;

}  // namespace ds_sparse_ring
