// A warpgroup that marks wanted keys: the 64 rows of one query block and head against all key blocks of the tile's walk.
//
// No product is in flight beside this warpgroup's own epilogue: those of the three others are.
#pragma once

#include "softmax.cuh"
#include "wanted_tile.cuh"

namespace ds_sparse_ring {

// The sum of the largest exponentials of blocks, in base 2, of a thread's two rows (see softmax.cuh), alike in the lanes of a quad.
struct BlockSums {
  float largest[2], total[2];  // maximum, and sum relative to it
  float weight[2];             // of the last block's largest exponential, relative to the maximum

  __device__ __forceinline__ void begin(const float (&seen)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = seen[r], total[r] = weight[r] = 1.0f;
  }

  __device__ __forceinline__ void add(const float (&seen)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool grown = seen[r] > largest[r];
      const float ratio = exp2_fast(-fabsf(seen[r] - largest[r]));  // of the smaller one
      total[r] = grown ? fmaf(total[r], ratio, 1.0f) : total[r] + ratio;
      largest[r] = fmaxf(largest[r], seen[r]);
      weight[r] = grown ? 1.0f : ratio;
    }
  }
};

template <Element kElement, int kHeadSize>
struct WantedConsumer {
  using Stages = KeyRing<kHeadSize>;
  static constexpr int kSteps = kHeadSize / 16;

  const WantedProblem& p;
  const WantedTile& tile;
  const Stages& ring;
  Place<Stages::stage_count> place;
  uint32_t q[kSteps][4];
  BlockSums sums;
  bool valid[2];  // of the thread's two rows: those that fill up the document want nothing

  __device__ __forceinline__ WantedConsumer(const WantedProblem& problem, const WantedTile& t, const Stages& r)
      : p(problem), tile(t), ring(r) {}

  __device__ __forceinline__ void wait() const { barrier_wait(ring.full + 8 * place.stage, place.phase, place.stage | 0x100); }

  // this warp will not read the stage again
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * place.stage);
    place.advance();
  }

  // a warpgroup without a head
  __device__ __forceinline__ void pass() {
    const int steps = tile.steps();
    for (int step = 0; step < steps; ++step) {
      wait();
      release();
    }
  }

  // as the first operand of a product, straight from global memory: once for a whole walk
  __device__ __forceinline__ void load_queries(int head) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const auto* at = static_cast<const uint16_t*>(p.q) + head * p.q_head + (int64_t{tile.local} * 64 + row) * p.q_row + 2 * (lane % 4);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        q[step][i] = *reinterpret_cast<const uint32_t*>(at + i % 2 * 8 * p.q_row + 16 * step + i / 2 * 8);
#pragma unroll
    for (int r = 0; r < 2; ++r) valid[r] = row + 8 * r < p.valid[tile.local];
    pin(q);
  }

  // Raw scores of the next block. Each product has registers of its own to the compiler: with one array for all, ptxas would
  // serialise them (C7511).
  __device__ __forceinline__ void multiply(float (&s)[32]) {
    wait();
    products_begin();
    score_product<kElement>(s, q, ring.stages + place.stage * Stages::stage_bytes);
    products_commit();
    products_wait<0>();
    pin(s);
    release();
  }

  // the largest scaled score of each row
  __device__ __forceinline__ void largest_scores(const float (&s)[32], float (&seen)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) most = fmaxf(most, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      seen[r] = quad_max(most) * p.scale_log2;
    }
  }

  // Whether a row of this warp may want its best key of the last block: without a logarithm, and a little too often, since `mark`
  // rounds otherwise.
  __device__ __forceinline__ bool may_want() const {
    const float price = p.price * (1.0f - 1.0f / 1024.0f);
    const bool wants = (valid[0] && sums.weight[0] >= price * sums.total[0]) || (valid[1] && sums.weight[1] >= price * sums.total[1]);
    return __any_sync(0xFFFFFFFFu, wants);
  }

  // the bits of what this warp's rows want of a block
  __device__ __forceinline__ void mark(const float (&s)[32], unsigned long long* word) const {
    float limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) limit[r] = valid[r] ? log2_fast(sums.total[r]) + p.log2_price : -minus_infinity();
    uint32_t bits[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t mine = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (fmaf(s[16 * half + 4 * j + i], p.scale_log2, -sums.largest[i / 2]) >= limit[i / 2]) mine |= 1u << (8 * j + i % 2);
      bits[half] = __reduce_or_sync(0xFFFFFFFFu, mine << (2 * (threadIdx.x % 4)));
    }
    if (threadIdx.x % 32 == 0 && (bits[0] | bits[1])) atomicOr(word, static_cast<unsigned long long>(bits[1]) << 32 | bits[0]);
  }

  __device__ __forceinline__ void own_block() {
    float s[32], seen[2];
    multiply(s);
    mask_causal(s);
    largest_scores(s, seen);
    sums.begin(seen);
  }

  // a block that the sum has not seen
  __device__ __forceinline__ void add_block(float (&s)[32]) {
    float seen[2];
    multiply(s);
    largest_scores(s, seen);
    sums.add(seen);
  }

  __device__ __forceinline__ void run(int warpgroup) {
    if (warpgroup >= tile.heads) return pass();
    const int head = tile.first_head + warpgroup, reach = tile.own - tile.first;
    load_queries(head);
    unsigned long long* const words = p.words + p.slot[tile.local] + head / p.heads_per_pattern * p.reach[tile.local];
    own_block();
    float of_first[32];
    add_block(of_first);
    for (int back = 1; back < reach; ++back) {
      float s[32];
      add_block(s);
      if (back >= p.window && may_want()) mark(s, words + (reach - back));
    }
    float again[32];  // scores of the document's first block, which are in the sum
    multiply(again);
    mark(again, words);
  }
};

}  // namespace ds_sparse_ring
