// Vertical-slash attention of one span of queries over one span of keys, forward and backward, for one instruction set.
//
// Forward: for each query block and head, online softmax over chunks of key tiles, then one merge into the accumulators.
// Backward, one pass over the scores (10 d per entry, nothing recomputed twice): each thread owns a run of query blocks, so dq
// needs no lock; dk and dv of a head shared with the run before go to buffers of its own, added in a fixed order afterwards.
// Columns follow in a second loop, parallel over (segment, pattern), where dq and the columns' gradients both have one owner.
// Results depend on the number of threads only through that order, never on timing.
#pragma once

namespace {

constexpr int kChunk = 4;  // tiles of 64 keys whose scores are held at once: 64 KiB, so that they stay in L2
constexpr int64_t kTile = kBlock * kBlock;

struct Tile {
  const float *k_packed, *v_packed, *k, *v;  // [D, 64], [D, 64] (backward), [keys, D], [keys, D]
  int64_t keys;                              // at most 64
  bool diagonal;                             // element-wise causal
  float bias[kBlock];                        // 0 or -inf per key, used if `biased`
  bool biased;
};

// The three products of a tile. Of a diagonal tile only the lower triangle is computed, in steps of 16 rows: with few keys per
// query block that is a good part of the work.
constexpr int64_t kStep = 16;

// out[64, 64] = x y^T for rows x [64, D] and keys given packed; above a diagonal tile's steps nothing is written
inline void score_product(const Tile& tile, const float* x, const float* packed, int64_t d, float* out) {
  if (!tile.diagonal) return gemm(kBlock, kBlock, d, {x, d, 1}, packed, kBlock, out, kBlock, false);
  for (int64_t r = 0; r < kBlock; r += kStep)
    gemm(kStep, r + kStep, d, {x + r * d, d, 1}, packed, kBlock, out + r * kBlock, kBlock, false);
}

// out[64, D] += w y for weights w [64, 64] and keys or values y [keys, D]
inline void row_product(const Tile& tile, const float* w, const float* y, int64_t d, float* out) {
  if (!tile.diagonal) return gemm(kBlock, d, tile.keys, {w, kBlock, 1}, y, d, out, d, true);
  for (int64_t r = 0; r < kBlock; r += kStep) gemm(kStep, d, r + kStep, {w + r * kBlock, kBlock, 1}, y, d, out + r * d, d, true);
}

// out[keys, D] += w^T x for weights w [64, 64] and rows x [64, D]
inline void key_product(const Tile& tile, const float* w, const float* x, int64_t d, float* out) {
  if (!tile.diagonal) return gemm(tile.keys, d, kBlock, {w, 1, kBlock}, x, d, out, d, true);
  for (int64_t c = 0; c < kBlock; c += kStep)
    gemm(kStep, d, kBlock - c, {w + c * kBlock + c, 1, kBlock}, x + c * d, d, out + c * d, d, true);
}

inline void apply_masks(const Tile& tile, float* scores) {
  const float infinity = __builtin_inff();
  if (tile.diagonal)
    for (int64_t r = 0; r < kBlock; ++r)
      for (int64_t c = r + 1; c < kBlock; ++c) scores[r * kBlock + c] = -infinity;
  if (tile.biased)  // a choice, not a sum: a NaN in a column must not reach rows that do not read it
    for (int64_t r = 0; r < kBlock; ++r)
      for (int64_t c = 0; c < kBlock; c += W) {
        const vf bias = load(tile.bias + c);
        store(scores + r * kBlock + c, bias == vf{} ? load(scores + r * kBlock + c) : bias);
      }
}

struct SoftmaxState {
  float largest[kBlock], total[kBlock];
  float* o;  // [64, D], not normalised

  void reset(int64_t head_size) {
    for (int64_t r = 0; r < kBlock; ++r) largest[r] = -__builtin_inff(), total[r] = 0;
    std::memset(o, 0, sizeof(float) * kBlock * head_size);
  }

  // raw scores of `count` tiles -> probabilities against the new maximum; what was there before is rescaled to it
  void update(float* scores, int count, int64_t head_size, float scale) {
    for (int64_t r = 0; r < kBlock; ++r) {
      vf m = splat(-__builtin_inff());
      for (int t = 0; t < count; ++t)
        for (int64_t c = 0; c < kBlock; c += W) m = vmax(m, load(scores + t * kTile + r * kBlock + c));
      const float seen = reduce_max(m) * scale, next = seen > largest[r] ? seen : largest[r];
      const float base = next == -__builtin_inff() ? 0.0f : next;  // a row without a key so far
      vf sum = vf{};
      for (int t = 0; t < count; ++t)
        for (int64_t c = 0; c < kBlock; c += W) {
          float* at = scores + t * kTile + r * kBlock + c;
          const vf weight = vexp(load(at) * splat(scale) - splat(base));
          store(at, weight);
          sum += weight;
        }
      const float factor = next == largest[r] ? 1.0f : std::exp(largest[r] - base);
      if (factor != 1.0f)
        for (int64_t d = 0; d < head_size; d += W) store(o + r * head_size + d, load(o + r * head_size + d) * splat(factor));
      total[r] = total[r] * factor + reduce_sum(sum);
      largest[r] = next;
    }
  }

  // merge into normalised accumulators; rows without a key change nothing
  void merge(float* o_acc, float* lse_acc, int64_t head_size) const {
    for (int64_t r = 0; r < kBlock; ++r) {
      if (total[r] == 0) continue;
      const float lse = largest[r] + std::log(total[r]);
      if (lse_acc[r] == -__builtin_inff()) {  // the first result of this row: nothing to read
        const vf scale = splat(1.0f / total[r]);
        for (int64_t d = 0; d < head_size; d += W) store(o_acc + r * head_size + d, load(o + r * head_size + d) * scale);
        lse_acc[r] = lse;
        continue;
      }
      const float high = lse_acc[r] > lse ? lse_acc[r] : lse;
      const float old_weight = std::exp(lse_acc[r] - high), new_weight = std::exp(lse - high);
      const float sum = old_weight + new_weight;
      const vf keep = splat(old_weight / sum), add = splat(new_weight / sum / total[r]);
      for (int64_t d = 0; d < head_size; d += W)
        store(o_acc + r * head_size + d, load(o_acc + r * head_size + d) * keep + load(o + r * head_size + d) * add);
      lse_acc[r] = high + std::log(sum);
    }
  }
};

inline void attend(const Tile* tiles, int count, const float* q, int64_t head_size, float scale, float* scores,
                   SoftmaxState& state) {
  for (int t = 0; t < count; ++t) {
    score_product(tiles[t], q, tiles[t].k_packed, head_size, scores + t * kTile);
    apply_masks(tiles[t], scores + t * kTile);
  }
  state.update(scores, count, head_size, scale);
  for (int t = 0; t < count; ++t) row_product(tiles[t], scores + t * kTile, tiles[t].v, head_size, state.o);
}

struct Call {  // what all tiles of a call share
  const Problem& p;
  const float *k_packed, *v_packed;              // [K, m blocks, D, 64]
  const float *column_k_packed, *column_v_packed;  // [tiles, D, 64]
  const ColumnTiles& column_tiles;

  Tile block(int64_t kv_head, int64_t local, bool diagonal) const {
    const int64_t at = (kv_head * p.k_blocks + local) * kBlock * p.head_size;
    return {k_packed + at, v_packed ? v_packed + at : nullptr, p.k + at, p.v + at, kBlock, diagonal, {}, false};
  }

  // tile t of the columns of (segment, pattern); false if none of them counts for the query block
  bool column(const QueryBlock& q, int64_t pattern, int64_t t, Tile& tile) const {
    const int64_t row = q.segment * p.index.patterns + pattern;
    const int64_t begin = p.index.column_ptr[row] + t * kBlock;
    const int64_t left = p.index.column_ptr[row + 1] - begin, size = left < kBlock ? left : kBlock;
    const int64_t first = p.index.diagonal_ptr[row];
    bool counted[kBlock];
    const int64_t total = count_columns(p.index.columns + begin, size, q, p.index.diagonals + first,
                                        p.index.diagonal_ptr[row + 1] - first, counted);
    if (total == 0) return false;
    const int64_t packed = (column_tiles.first[row] + t) * kBlock * p.head_size;
    tile.k_packed = column_k_packed + packed;
    tile.v_packed = column_v_packed ? column_v_packed + packed : nullptr;
    tile.k = p.column_k + begin * p.head_size;
    tile.v = p.column_v + begin * p.head_size;
    tile.keys = size;
    tile.diagonal = false;
    tile.biased = total < kBlock;
    for (int64_t c = 0; c < kBlock; ++c) tile.bias[c] = c < size && counted[c] ? 0.0f : -__builtin_inff();
    return true;
  }

  int64_t columns_of(const QueryBlock& q, int64_t pattern) const {  // in tiles
    if (!p.column_k) return 0;
    const int64_t row = q.segment * p.index.patterns + pattern;
    return column_tiles.first[row + 1] - column_tiles.first[row];
  }

  QueryBlock query(int64_t local) const {
    const int64_t global = p.q_stride * local + p.q_start;
    return {local, global, segment_of(p.index, global)};
  }
};

inline void forward_block(const Call& call, const QueryBlock& query, int64_t head, KeyBlocks& keys, float* scores, SoftmaxState& state,
                          const ForwardOutput& out) {
  const Problem& p = call.p;
  const int64_t pattern = head / p.index.heads_per_pattern, kv_head = head / (p.heads / p.kv_heads);
  const int64_t row = (head * p.q_blocks + query.local) * kBlock, d = p.head_size;
  keys.find(p, query, pattern);
  const int64_t columns = call.columns_of(query, pattern);
  if (keys.count + columns == 0) return;
  const float* q = p.q + row * d;
  state.reset(d);
  Tile tiles[kChunk];
  int count = 0;
  for (int64_t i = 0; i < keys.count + columns; ++i) {
    if (i < keys.count) tiles[count++] = call.block(kv_head, keys.local[i], i == keys.diagonal);
    else if (call.column(query, pattern, i - keys.count, tiles[count])) ++count;
    if (count == kChunk) attend(tiles, count, q, d, p.scale, scores, state), count = 0;
  }
  if (count) attend(tiles, count, q, d, p.scale, scores, state);
  state.merge(out.o + row * d, out.lse + row, d);
}

struct Workspace {  // one thread's buffers
  Buffer scores, d_scores, o;
  explicit Workspace(int64_t head_size) : scores(kChunk * kTile), d_scores(kTile), o(kBlock * head_size) {}
};

struct Gradients {  // where the gradients of a tile's keys and values go, [keys, D] each
  float *dk, *dv;
};

struct RowData {  // one query block of one head
  const float *q, *d_o, *lse, *delta;
  float* dq;  // [64, D]
  RowData(const Problem& p, const BackwardInput& in, float* dq_all, int64_t head, int64_t local) {
    const int64_t row = (head * p.q_blocks + local) * kBlock, at = row * p.head_size;
    q = p.q + at, d_o = in.d_o + at, lse = in.lse + row, delta = in.delta + row, dq = dq_all + at;
  }
};

inline void backward_tile(const Tile& tile, const RowData& rows, int64_t d, float scale, Workspace& work, const Gradients& out) {
  float *p = work.scores.data, *ds = work.d_scores.data;
  score_product(tile, rows.q, tile.k_packed, d, p);
  apply_masks(tile, p);
  score_product(tile, rows.d_o, tile.v_packed, d, ds);
  for (int64_t r = 0; r < kBlock; ++r) {
    // a row without any key at all has lse = -inf: its scores here are all masked, and 0 keeps the difference at -inf
    const vf lse = splat(rows.lse[r] == -__builtin_inff() ? 0.0f : rows.lse[r]), delta = splat(rows.delta[r]);
    for (int64_t c = 0; c < kBlock; c += W) {
      const vf weight = vexp(load(p + r * kBlock + c) * splat(scale) - lse);
      store(p + r * kBlock + c, weight);
      store(ds + r * kBlock + c, weight * (load(ds + r * kBlock + c) - delta) * splat(scale));
    }
  }
  key_product(tile, p, rows.d_o, d, out.dv);
  key_product(tile, ds, rows.q, d, out.dk);
  row_product(tile, ds, tile.k, d, rows.dq);
}

// Work (in tiles) of each (key/value head, query block), cut into one contiguous run of equal work per thread.
struct Shares {
  int threads;
  int64_t* bounds;  // threads + 1 positions in [0, K * q_blocks]
  Shares(const Call& call, int threads_) : threads(threads_) {
    const Problem& p = call.p;
    const int64_t units = p.kv_heads * p.q_blocks, group = p.heads / p.kv_heads;
    int64_t* until = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * (units + 1)));
#pragma omp parallel num_threads(threads)
    {
      KeyBlocks keys(p);
#pragma omp for schedule(static)
      for (int64_t u = 0; u < units; ++u) {
        int64_t work = 0;
        for (int64_t h = u / p.q_blocks * group; h < (u / p.q_blocks + 1) * group; ++h) {
          keys.find(p, call.query(u % p.q_blocks), h / p.index.heads_per_pattern);
          work += keys.count;
        }
        until[u + 1] = work;
      }
    }
    until[0] = 0;
    for (int64_t u = 0; u < units; ++u) until[u + 1] += until[u];
    bounds = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * (threads + 1)));
    int64_t at = 0;
    for (int t = 0; t < threads; ++t) {
      while (at < units && until[at] < until[units] * t / threads) ++at;
      bounds[t] = at;
    }
    bounds[0] = 0;
    bounds[threads] = units;
    std::free(until);
  }
  ~Shares() { std::free(bounds); }
  Shares(const Shares&) = delete;
  Shares& operator=(const Shares&) = delete;
};

// Private dk and dv of the key/value head in whose middle a thread's run begins: the run before it has written to the outputs.
// Every other head that the run touches begins in it, and goes to the outputs directly.
struct PrivateGradients {
  int64_t kv_head;  // -1: none
  Buffer dk, dv;
  PrivateGradients(const Problem& p, int64_t begin, int64_t end)
      : kv_head(begin < end && begin % p.q_blocks ? begin / p.q_blocks : -1), dk(size(p), true), dv(size(p), true) {}
  int64_t size(const Problem& p) const { return kv_head < 0 ? 0 : p.k_blocks * kBlock * p.head_size; }
  Gradients at(const Problem& p, const BackwardOutput& out, int64_t head, int64_t local) const {
    const int64_t offset = local * kBlock * p.head_size, all = head * p.k_blocks * kBlock * p.head_size + offset;
    return head == kv_head ? Gradients{dk.data + offset, dv.data + offset} : Gradients{out.dk + all, out.dv + all};
  }
};

inline void backward_slashes(const Call& call, const BackwardInput& in, const BackwardOutput& out, int threads) {
  const Problem& p = call.p;
  const int64_t group = p.heads / p.kv_heads, d = p.head_size;
  Shares shares(call, threads);
  PrivateGradients** parts = static_cast<PrivateGradients**>(std::calloc(threads, sizeof(PrivateGradients*)));
#pragma omp parallel num_threads(threads)
  {
    Workspace work(d);
    KeyBlocks keys(p);
#pragma omp for schedule(static, 1)
    for (int t = 0; t < threads; ++t) {
      parts[t] = new PrivateGradients(p, shares.bounds[t], shares.bounds[t + 1]);
      for (int64_t u = shares.bounds[t]; u < shares.bounds[t + 1]; ++u) {
        const int64_t kv_head = u / p.q_blocks;
        const QueryBlock query = call.query(u % p.q_blocks);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          keys.find(p, query, head / p.index.heads_per_pattern);
          const RowData rows(p, in, out.dq, head, query.local);
          for (int64_t i = 0; i < keys.count; ++i)
            backward_tile(call.block(kv_head, keys.local[i], i == keys.diagonal), rows, d, p.scale, work,
                          parts[t]->at(p, out, kv_head, keys.local[i]));
        }
      }
    }
    const int64_t size = p.k_blocks * kBlock * d;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.kv_heads * size; i += kBlock)
      for (int t = 0; t < threads; ++t) {
        if (parts[t]->kv_head != i / size) continue;
        const int64_t at = i % size;
        for (int64_t x = 0; x < kBlock; x += W) {
          store(out.dk + i + x, load(out.dk + i + x) + load(parts[t]->dk.data + at + x));
          store(out.dv + i + x, load(out.dv + i + x) + load(parts[t]->dv.data + at + x));
        }
      }
  }
  for (int t = 0; t < threads; ++t) delete parts[t];
  std::free(parts);
}

inline void backward_columns(const Call& call, const BackwardInput& in, const BackwardOutput& out, int threads) {
  const Problem& p = call.p;
  const int64_t d = p.head_size, shared = p.index.heads_per_pattern;
#pragma omp parallel num_threads(threads)
  {
    Workspace work(d);
    Tile tile;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < p.index.segments * p.index.patterns; ++row) {
      const int64_t pattern = row % p.index.patterns;
      for (int64_t local = 0; local < p.q_blocks; ++local) {
        const QueryBlock query = call.query(local);
        const int64_t columns = query.segment == row / p.index.patterns ? call.columns_of(query, pattern) : 0;
        if (columns == 0) continue;
        for (int64_t head = pattern * shared; head < (pattern + 1) * shared; ++head)
          for (int64_t t = 0; t < columns; ++t)
            if (call.column(query, pattern, t, tile)) {
              const int64_t at = (p.index.column_ptr[row] + t * kBlock) * d;
              backward_tile(tile, RowData(p, in, out.dq, head, local), d, p.scale, work,
                            {out.d_column_k + at, out.d_column_v + at});
            }
      }
    }
  }
}

inline void forward_all(const Problem& p, const ForwardOutput& out, int threads) {
  const Packed k_packed(p, p.k, threads);
  const ColumnTiles column_tiles(p);
  const PackedColumns column_k(p, column_tiles, p.column_k, threads);
  const Call call{p, k_packed.blocks.data, nullptr, column_k.tiles.data, nullptr, column_tiles};
#pragma omp parallel num_threads(threads)
  {
    Workspace work(p.head_size);
    KeyBlocks keys(p);
    SoftmaxState state;
    state.o = work.o.data;
    // the last query blocks of a head have most keys: they go first, so that the threads finish together
#pragma omp for schedule(dynamic)
    for (int64_t unit = p.heads * p.q_blocks - 1; unit >= 0; --unit)
      forward_block(call, call.query(unit / p.heads), unit % p.heads, keys, work.scores.data, state, out);
  }
}

inline void backward_all(const Problem& p, const BackwardInput& in, const BackwardOutput& out, int threads) {
  const Packed k_packed(p, p.k, threads), v_packed(p, p.v, threads);
  const ColumnTiles column_tiles(p);
  const PackedColumns column_k(p, column_tiles, p.column_k, threads), column_v(p, column_tiles, p.column_v, threads);
  const Call call{p, k_packed.blocks.data, v_packed.blocks.data, column_k.tiles.data, column_v.tiles.data, column_tiles};
  backward_slashes(call, in, out, threads);
  if (p.column_k) backward_columns(call, in, out, threads);
}

}  // namespace
