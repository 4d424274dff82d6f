// A warpgroup: attention of its part (64 rows) of one tile after the other over the stages that it reads; others it gives back.
//
// Either, while the softmax of a block runs, the product of the block before with its values is on the matrix units, and the other
// warpgroup's products fill what is left; or nothing overlaps within a warpgroup, and more of them fill each other's gaps.
#pragma once

#include "epilogue.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "tile_scheduler.cuh"
#include "wgmma_shared.cuh"

namespace ds_sparse_ring {

enum Found { kKeys, kTileEnds, kFull };

// A part's queries, as the first operand of q k^T.
template <int kHeadSize, bool kInRegisters>
struct Queries {
  uint32_t steps[kHeadSize / 16][4];
};

template <int kHeadSize>
struct Queries<kHeadSize, false> {
  uint32_t tile;  // where they stand in shared memory
};

template <Element kElement, class Form>
struct Consumer {
  using Stages = Ring<Form>;
  using PartQueries = Queries<Form::head_size, Form::query_buffers == 0>;
  static constexpr int kSums = Form::head_size / 2;  // of o, a thread's
  static constexpr uint32_t kNoStage = Stages::stage_count;

  const ForwardProblem& p;
  const Stages& ring;
  const int part;
  Place<Stages::stage_count> place;     // the next stage; once `flags` are read, the current one
  Place<Stages::query_buffers> buffer;  // of this tile's queries
  uint32_t flags;

  __device__ __forceinline__ Consumer(const ForwardProblem& problem, const Stages& r, int h)
      : p(problem), ring(r), part(h), flags(0) {}

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

  // Waits for the next stage that this part reads, or for the end of the tile; stages between are given back unread. `held`: a
  // stage that this part still needs. The ring must not come round to it, because the copies behind it would wait for this
  // part.
  __device__ __forceinline__ Found next(uint32_t held) {
    wait();
    while (!(flags & (kBoundary | kUsed << part))) {
      release(place.stage);
      place.advance();
      if (place.stage == held) return kFull;
      wait();
    }
    return flags & kBoundary ? kTileEnds : kKeys;
  }

  // from the current stage and those of the other parts, which are given back, or from their buffer, until `end_tile`
  __device__ __forceinline__ void take_queries(PartQueries& q) {
    if constexpr (Stages::query_buffers > 0) {
      release(place.stage);
      q.tile = ring.queries + buffer.stage * Stages::query_bytes + part * Stages::tile_bytes;
      barrier_wait(ring.queries_full + 8 * buffer.stage, buffer.phase, buffer.stage | 0x300);
    } else {
#pragma unroll
      for (int first = 0; first < Form::parts; first += 2) {
        if (first > 0) {
          place.advance();
          wait();
        }
        if (part / 2 == first / 2) {
          load_queries(q.steps);
          fence_async();
        }
        release(place.stage);
      }
    }
  }

  __device__ __forceinline__ void end_tile() {
    if constexpr (Stages::query_buffers > 0) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(ring.queries_empty + 8 * buffer.stage);
      buffer.advance();
    }
  }

  template <int kSteps>
  __device__ __forceinline__ void load_queries(uint32_t (&q)[kSteps][4]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t at = stage_address(place.stage) + part % 2 * Stages::tile_bytes + row * 128;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int unit = 2 * (step % 4) + lane / 16;
      load_matrices(q[step], at + step / 4 * kBoxBytes + ((unit ^ (row % 8)) << 4));
    }
  }

  __device__ __forceinline__ void mask(float (&s)[32]) const {
    if (flags & kCausal << part) mask_causal(s);
    if (flags & kMasked) {
      const Note& note = ring.notes[place.stage];
      const uint32_t keys[2] = {note.mask[part][0], note.mask[part][1]};
      if ((keys[0] & keys[1]) != 0xFFFFFFFFu) mask_keys(s, keys);
    }
  }

  __device__ __forceinline__ void scores(const PartQueries& q, float (&s)[32]) const {
    if constexpr (Stages::query_buffers > 0)
      product_over_dims<kElement, Form::head_size>(s, q.tile, stage_address(place.stage));
    else
      score_product<kElement>(s, q.steps, stage_address(place.stage));
  }

  // raw scores of the current stage, with nothing else on the matrix units
  __device__ __forceinline__ void first_scores(const PartQueries& q, float (&s)[32]) const {
    products_begin();
    scores(q, s);
    products_commit();
    products_wait<0>();
    pin(s);
    mask(s);
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
  __device__ __forceinline__ void attend(const PartQueries& q, float (&o)[kSums], Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
    softmax.begin();
    if constexpr (Form::overlapped)
      attend_overlapped(q, o, softmax);
    else
      attend_in_turn(q, o, softmax);
  }

  // one product after the other: the other warpgroups of a multiprocessor fill the time
  __device__ __forceinline__ void attend_in_turn(const PartQueries& q, float (&o)[kSums], Softmax& softmax) {
    float s[32];
    uint32_t weights[4][4];
    while (next(kNoStage) == kKeys) {
      first_scores(q, s);
      softmax.grow(s, p.scale_log2);
      softmax.rescale_output(o);
      softmax.weigh(s, p.scale_log2);
      weights_to_operand<kElement>(s, weights);
      last_values(o, weights, place.stage);
      place.advance();
    }
  }

  // the values of a block beside the scores of the next one and their softmax
  __device__ __forceinline__ void attend_overlapped(const PartQueries& q, float (&o)[kSums], Softmax& softmax) {
    float s[32];
    uint32_t weights[4][4];
    while (next(kNoStage) == kKeys) {
      first_scores(q, s);
      softmax.grow(s, p.scale_log2);
      softmax.weigh(s, p.scale_log2);
      softmax.rescale_output(o);
      weights_to_operand<kElement>(s, weights);
      uint32_t before = place.stage;
      place.advance();
      Found found;
      while ((found = next(before)) == kKeys) {
        pin(s), pin(o), pin(weights);
        products_begin();
        scores(q, s);
        products_commit();
        value_product<kElement>(o, weights, stage_address(before) + Stages::tile_bytes);
        products_commit();
        products_wait<1>();
        pin(s);
        mask(s);
        softmax.grow(s, p.scale_log2);
        softmax.weigh(s, p.scale_log2);
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
    const TileScheduler<Form::parts> scheduler(p);
    wait();
    while (!(flags & kEnd)) {
      const Part mine = scheduler.part_of(ring.notes[place.stage].tile, part);
      PartQueries q;
      take_queries(q);
      place.advance();

      float o[kSums];
      Softmax softmax;
      attend(q, o, softmax);
      end_tile();
      if (mine.valid) write_part<kElement, kOutput>(p, mine, o, softmax);
    }
  }
};

}  // namespace ds_sparse_ring
