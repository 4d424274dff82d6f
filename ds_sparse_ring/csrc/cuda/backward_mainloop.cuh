// A warpgroup: gradients of its 64 keys of one tile after the other, over the query blocks that read them.
//
// Per query block, transposed: s = k q^T, p = exp2(s - lse), dp = v do^T, ds = p (dp - delta), dv += p do, dk += ds q, and
// dq += ds^T k, which leaves the chip. The order keeps four products of 64 x 64 in flight beside all other work:
//
//   on the matrix units   s(i)            dp(i)        dv(i)              dk(i), dq(i), s(i + 1)
//   beside them           dq(i - 1) out   p(i)         ds(i), to shared   next stage
//
// If both halves read a query block, each warpgroup multiplies ds of all 128 keys with 64 dims of the keys, so that one sum
// leaves instead of two. Otherwise the warpgroup that does makes both halves of the dims, one after the other.
#pragma once

#include "backward_epilogue.cuh"
#include "backward_ring.cuh"
#include "readers.cuh"

namespace ds_sparse_ring {

enum FoundQueries { kQueriesFound, kTileOver, kRingFull };
constexpr uint32_t kNoQueryStage = ~0u;

template <Element kElement, int kDims>
struct QueryConsumer {
  using Memory = BackwardMemory<kDims>;
  static constexpr int kSums = kDims / 2;  // of a thread, for keys or values
  // Probabilities carry the softmax scale, so that no sum has to be multiplied with it. Small ones would lose digits in float16.
  static constexpr bool kScaled = kElement == kBfloat16;

  const BackwardArguments& a;
  const Memory& memory;
  QueryPlace<Memory::stage_count> place;       // the next stage; once `flags` are read, the current one
  uint32_t flags = 0;
  uint32_t shared_count = 0;  // stages so far that both halves read: slot and phase of their weights

  __device__ __forceinline__ QueryConsumer(const BackwardArguments& arguments, const Memory& m)
      : a(arguments), memory(m) {}

  static __device__ __forceinline__ uint32_t half() { return uniform(thread_now() / 128 - 1); }

  __device__ __forceinline__ void wait() {
    barrier_wait(memory.full + 8 * place.stage, place.phase, place.stage | 0x100);
    flags = load_word(memory.note(place.stage) + kNoteFlags);
  }

  // each warp says for itself that it is done
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (thread_now() % 32 == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void release(uint32_t stage) const { arrive(memory.empty + 8 * stage); }

  // Waits for the next stage that this half reads, or for the end of the tile. The ring must not come round to `held`, a stage
  // that this half still needs: the copies behind it would wait for this half, and it for them.
  __device__ __forceinline__ FoundQueries next(uint32_t held) {
    wait();
    while (!(flags & (kNoQueries | kReads << half()))) {
      release(place.stage);
      place.advance();
      if (place.stage == held) return kRingFull;
      wait();
    }
    return flags & kNoQueries ? kTileOver : kQueriesFound;
  }

  // keys that do not count for a query, -inf. s[4 j + 2 r + e]: key 16 warp + lane / 4 + 8 r, query 8 j + 2 (lane % 4) + e
  __device__ __forceinline__ void mask(float (&s)[32]) const {
    const uint32_t thread = thread_now(), lane = thread % 32, warp = thread % 128 / 32;
    if (flags & kOwnBlock << half()) {
      const uint32_t key = 16 * warp + lane / 4, query = 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (8 * j + query + i % 2 < key + 8 * (i / 2)) s[4 * j + i] = minus_infinity();
    }
    if (flags & kSomeColumns) {
      const uint32_t keys = load_word(memory.note(place.stage) + kNoteMask + 8 * half() + 4 * (warp / 2)) >> 16 * (warp % 2) & 0xFFFF;
      if (keys == 0xFFFF) return;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!(keys >> (lane / 4 + 8 * r) & 1)) {
#pragma unroll
          for (int j = 0; j < 8; ++j) s[4 * j + 2 * r] = s[4 * j + 2 * r + 1] = minus_infinity();
        }
    }
  }

  // raw scores -> probabilities, in place. A row without any key has only masked scores, whatever its lse.
  __device__ __forceinline__ void probabilities(float (&s)[32]) const {
    const float scale = a.problem.scale_log2, carried = kScaled ? a.problem.log2_scale : 0.0f;
    const uint32_t lse = memory.lse(place.stage) + 8 * (thread_now() % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 row = load_pair(lse + 32 * j);
      const float x = fminf(fmaf(row.x, -kLog2E, carried), kHuge), y = fminf(fmaf(row.y, -kLog2E, carried), kHuge);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * j + 2 * r] = exp2_fast(fmaf(s[4 * j + 2 * r], scale, x));
        s[4 * j + 2 * r + 1] = exp2_fast(fmaf(s[4 * j + 2 * r + 1], scale, y));
      }
    }
  }

  // probabilities -> gradients of the scores, in place
  __device__ __forceinline__ void score_gradients(float (&p)[32], const float (&dp)[32]) const {
    const uint32_t delta = memory.delta(place.stage) + 8 * (thread_now() % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 row = load_pair(delta + 32 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[4 * j + 2 * r] *= dp[4 * j + 2 * r] - row.x;
        p[4 * j + 2 * r + 1] *= dp[4 * j + 2 * r + 1] - row.y;
      }
    }
  }

  // 64 keys x 64 queries of bf16 into a box, as an operand with the contraction across its rows
  __device__ __forceinline__ void store_weights(const uint32_t (&w)[4][4], uint32_t box) const {
    const uint32_t thread = thread_now(), lane = thread % 32, row = thread % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4; ++k) store_matrices(box + row * 128 + (((2 * k + lane / 16) ^ (row % 8)) << 4), w[k]);
    fence_async();
  }

  // the box that this warp shares with another one is free
  __device__ __forceinline__ void await_sum_box() const {
    const uint32_t thread = thread_now();
    if (thread % 64 == 0) wait_added_read();
    sync_warps(thread / 64 - 1, 64);
  }

  struct QueryBlock {
    uint32_t block, head;
  };
  __device__ __forceinline__ QueryBlock query_block(uint32_t stage) const {
    return {load_word(memory.note(stage) + kNoteBlock), load_word(memory.note(stage) + kNoteHead)};
  }

  // dq^T [64 dims of `dims`, 64 queries] on its way to global memory. Two warps share a box of 32 dims; `alone`: no other half
  // reads these queries.
  __device__ __forceinline__ void add_queries(const float (&x)[32], QueryBlock to, int dims, bool alone) const {
    const uint32_t thread = thread_now(), lane = thread % 32, warp = thread % 128 / 32, pair = warp / 2, wg = thread / 128 - 1;
    const uint32_t box = memory.sum_box(wg, pair);
    const uint32_t dim = 16 * (warp % 2) + lane / 4, query = 2 * (lane % 4);
    const uint32_t at = box + query * 128 + ((dim / 4 ^ query) << 4) + dim % 4 * 4;
    const float scale = kScaled ? 1.0f : a.problem.scale;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)  // 8 dims further is 2 units, the next query a row and another swizzle
        store_float((at ^ (i / 2 * 32) ^ (i % 2 * 16)) + i % 2 * 128 + j * 1024, x[4 * j + i] * scale);
    fence_async();
    if (!alone && warp % 2) return arrive_warps(7 + 2 * wg + pair, 64);
    if (alone)  // and no warp stores its next weights while another one's product reads these: only shared ones have a barrier
      sync_warps(5 + wg, 128);
    else
      sync_warps(7 + 2 * wg + pair, 64);
    if (thread % 64 == 0) add_box(&a.dq, box, 64 * dims + 32 * pair, to.block * kBlock, to.head);
  }

  __device__ __forceinline__ void issue_scores(float (&s)[32], uint32_t h) const {
    pin(s);
    const uint32_t k = memory.k_tile(h), q = memory.q_tile(uniform(place.stage));
    products_begin();
    product_over_dims<kElement, kDims>(s, k, q);
    products_commit();
  }

  __device__ __forceinline__ void issue_keys(float (&dk)[kSums], uint32_t (&weights)[4][4], uint32_t stage) const {
    pin(weights), pin(dk);
    products_begin();
    value_product<kElement>(dk, weights, memory.q_tile(stage));
    products_commit();
  }

  // A stage whose scores are in s; ends with the next one's there, if there is one.
  __device__ __forceinline__ FoundQueries step(float (&s)[32], float (&x)[32], float (&dk)[kSums], float (&dv)[kSums]) {
    uint32_t operand[4][4];
    const uint32_t stage = uniform(place.stage), h = half();
    const bool shared = (flags & kReadsBoth) == kReadsBoth;
    pin(x);
    products_begin();
    product_over_dims<kElement, kDims>(x, memory.v_tile(h), memory.do_tile(stage));
    products_commit();
    if (flags & (kOwnBlock << h | kSomeColumns)) mask(s);
    probabilities(s);
    weights_to_operand<kElement>(s, operand);
    pin(operand), pin(dv);
    products_begin();
    value_product<kElement>(dv, operand, memory.do_tile(stage));
    products_commit();
    products_wait<1>();
    pin(x);
    score_gradients(s, x);
    uint32_t weights[4][4];
    weights_to_operand<kElement>(s, weights);
    const uint32_t slot = uniform(shared_count % 2), phase = shared_count / 2 % 2;
    barrier_wait(memory.weights_free + 8 * slot, phase ^ 1, slot | 0x300);
    store_weights(weights, memory.weights_box(slot, h));
    if (shared) {
      arrive(memory.weights_ready + 8 * slot);
      ++shared_count;
    } else {
      sync_warps(5 + h, 128);
    }
    place.advance();
    const FoundQueries found = next(stage);
    products_wait<0>();
    pin(dv), pin(operand);
    if (shared && (kDims == 128 || h == slot)) {
      const uint32_t dims = kDims == 128 ? h : 0;
      issue_keys(dk, weights, stage);
      barrier_wait(memory.weights_ready + 8 * slot, phase, slot | 0x400);
      pin(x);
      products_begin();
      product_over_keys<kElement>(x, memory.k_tile(0) + dims * kBoxBytes, memory.weights_box(slot, 0), false);
      product_over_keys<kElement>(x, memory.k_tile(1) + dims * kBoxBytes, memory.weights_box(slot, 1), true);
      products_commit();
      issue_scores(s, h);
      const QueryBlock to = query_block(stage);
      await_sum_box();
      products_wait<1>();
      pin(x), pin(dk), pin(weights);
      arrive(memory.weights_free + 8 * slot);
      release(stage);
      add_queries(x, to, dims, false);
      products_wait<0>();
      pin(s);
    } else if (shared) {  // the other half makes all dims
      issue_keys(dk, weights, stage);
      issue_scores(s, h);
      products_wait<1>();
      pin(dk), pin(weights);
      release(stage);
      products_wait<0>();
      pin(s);
    } else {
      if constexpr (kDims == 128) {
        pin(x);
        products_begin();
        product_over_keys<kElement>(x, memory.k_tile(h), memory.weights_box(slot, h), false);
        products_commit();
      }
      issue_keys(dk, weights, stage);
      if constexpr (kDims == 128) {
        await_sum_box();
        products_wait<1>();
        pin(x);
        add_queries(x, query_block(stage), 0, true);
      }
      constexpr uint32_t kLast = kDims / 64 - 1;
      pin(x);
      products_begin();
      product_over_keys<kElement>(x, memory.k_tile(h) + kLast * kBoxBytes, memory.weights_box(slot, h), false);
      products_commit();
      issue_scores(s, h);
      const QueryBlock to = query_block(stage);
      await_sum_box();
      products_wait<1>();
      pin(x), pin(dk), pin(weights);
      release(stage);
      add_queries(x, to, kLast, true);
      products_wait<0>();
      pin(s);
    }
    return found;
  }

  // all stages of a tile; ends with the boundary that follows it as the current stage. Whether there were any.
  __device__ __forceinline__ bool attend(float (&dk)[kSums], float (&dv)[kSums]) {
    float s[32], x[32];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
    while (next(kNoQueryStage) == kQueriesFound) {
      any = true;
      issue_scores(s, half());
      products_wait<0>();
      pin(s);
      FoundQueries found;
      while ((found = step(s, x, dk, dv)) == kQueriesFound) {
      }
      if (found == kTileOver) break;
    }
    arrive(memory.keys_free);
    return any;
  }

  __device__ __forceinline__ void run() {
    uint32_t keys_phase = 0;
    wait();
    while (!(flags & kNoMore)) {
      const int number = static_cast<int>(load_word(memory.note(place.stage) + kNoteBlock));
      release(place.stage);
      place.advance();
      barrier_wait(memory.keys_full, keys_phase, 0x500);
      keys_phase ^= 1;
      float dk[kSums], dv[kSums];
      const float scale = a.problem.scale;
      if (attend(dk, dv))
        add_key_gradients(a.problem, key_tile_of(a.problem, number), half(), dk, kScaled ? 1.0f : scale, dv,
                          kScaled ? 1.0f / scale : 1.0f);
    }
    wait_added();
  }
};

}  // namespace ds_sparse_ring
