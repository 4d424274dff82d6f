// A warpgroup: attention of its half (64 rows) of one tile after the other over the stages that it reads; others it gives back.
//
// While the softmax of a block runs, the product of the block before with its values is on the matrix units, and the other
// warpgroup's products fill what is left.
#pragma once

#include "epilogue.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "tile_scheduler.cuh"

namespace ds_sparse_ring {

enum Found { kKeys, kTileEnds, kFull };

template <Element kElement, int kHeadSize>
struct Consumer {
  using Stages = Ring<kHeadSize>;
  static constexpr int kSteps = kHeadSize / 16, kSums = kHeadSize / 2;  // of the scores' product; a thread's sums of o
  static constexpr uint32_t kNoStage = Stages::stage_count;

  const ForwardProblem& p;
  const Stages& ring;
  const int half;
  Place<Stages::stage_count> place;  // the next stage; once `flags` are read, the current one
  uint32_t flags;

  __device__ __forceinline__ Consumer(const ForwardProblem& problem, const Stages& r, int h)
      : p(problem), ring(r), half(h), flags(0) {}

  __device__ __forceinline__ uint32_t stage_address(uint32_t stage) const { return ring.stages + stage * Stages::stage_bytes; }

  __device__ __forceinline__ void wait() {
    barrier_wait(ring.full + 8 * place.stage, place.phase, place.stage | 0x100);
    flags = ring.notes[place.stage].flags;
  }

  // each warp says for itself that it will not read a stage again
  __device__ __forceinline__ void release(uint32_t stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * stage);
  }

  // Waits for the next stage that this half reads, or for the end of the tile; stages between are given back unread. `held`: a
  // stage that this half still needs. The ring must not come round to it, because the copies behind it would wait for this
  // half.
  __device__ __forceinline__ Found next(uint32_t held) {
    wait();
    while (!(flags & (kBoundary | kUsed << half))) {
      release(place.stage);
      place.advance();
      if (place.stage == held) return kFull;
      wait();
    }
    return flags & kBoundary ? kTileEnds : kKeys;
  }

  __device__ __forceinline__ void load_queries(uint32_t (&q)[kSteps][4]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t at = stage_address(place.stage) + half * Stages::tile_bytes + row * 128;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int unit = 2 * (step % 4) + lane / 16;
      load_matrices(q[step], at + step / 4 * kBoxBytes + ((unit ^ (row % 8)) << 4));
    }
  }

  __device__ __forceinline__ void mask(float (&s)[32]) const {
    if (flags & kCausal << half) mask_causal(s);
    if (flags & kMasked) {
      const Note& note = ring.notes[place.stage];
      const uint32_t keys[2] = {note.mask[half][0], note.mask[half][1]};
      if ((keys[0] & keys[1]) != 0xFFFFFFFFu) mask_keys(s, keys);
    }
  }

  // raw scores of the current stage and their softmax, with nothing else on the matrix units
  __device__ __forceinline__ void first_scores(const uint32_t (&q)[kSteps][4], float (&s)[32], Softmax& softmax) const {
    products_begin();
    score_product<kElement>(s, q, stage_address(place.stage));
    products_commit();
    products_wait<0>();
    pin(s);
    mask(s);
    softmax.step(s, p.scale_log2);
  }

  // the last weights times their values, with nothing behind
  __device__ __forceinline__ void last_values(float (&o)[kSums], uint32_t (&weights)[4][4], uint32_t stage) const {
    pin(o), pin(weights);
    products_begin();
    value_product<kElement>(o, weights, stage_address(stage) + Stages::tile_bytes);
    products_commit();
    products_wait<0>();
    pin(o);
    release(stage);
  }

  // all stages of a tile; ends with the boundary that follows it as the current stage
  __device__ __forceinline__ void attend(const uint32_t (&q)[kSteps][4], float (&o)[kSums], Softmax& softmax) {
    float s[32];
    uint32_t weights[4][4];
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
    softmax.begin();
    while (next(kNoStage) == kKeys) {
      first_scores(q, s, softmax);
      softmax.rescale_output(o);
      weights_to_operand<kElement>(s, weights);
      uint32_t before = place.stage;
      place.advance();
      Found found;
      while ((found = next(before)) == kKeys) {
        pin(s), pin(o), pin(weights);
        products_begin();
        score_product<kElement>(s, q, stage_address(place.stage));
        products_commit();
        value_product<kElement>(o, weights, stage_address(before) + Stages::tile_bytes);
        products_commit();
        products_wait<1>();
        pin(s);
        mask(s);
        softmax.step(s, p.scale_log2);
        products_wait<0>();
        pin(o), pin(s);
        release(before);
        softmax.rescale_output(o);
        weights_to_operand<kElement>(s, weights);
        before = place.stage;
        place.advance();
      }
      last_values(o, weights, before);
      if (found == kTileEnds) return;
    }
  }

  template <Output kOutput>
  __device__ __forceinline__ void run() {
    const TileScheduler scheduler(p);
    wait();
    while (!(flags & kEnd)) {
      const Half mine = scheduler.half_of(ring.notes[place.stage].tile, half);
      uint32_t q[kSteps][4];
      load_queries(q);
      fence_async();
      release(place.stage);
      place.advance();

      float o[kSums];
      Softmax softmax;
      attend(q, o, softmax);
      if (mine.valid) write_half<kElement, kOutput>(p, mine, o, softmax);
    }
  }
};

}  // namespace ds_sparse_ring
