// Which keys a query block reads, as a list of tiles of 64 keys, and the packed copies that the tiles point into.
#pragma once

namespace {

using namespace ds_sparse_ring;

struct Buffer {  // aligned floats, zeroed on request; freed with the scope
  float* data;
  explicit Buffer(int64_t size, bool zero = false) {
    const size_t bytes = static_cast<size_t>((size > 0 ? size : 1) * 4 + 63) / 64 * 64;
    data = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (zero && data) std::memset(data, 0, bytes);
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

// [rows, D] -> [D, 64], zeros behind `rows`: the operand of a product with 64 keys, whose rows are vectors over keys.
inline void pack_transposed(const float* x, int64_t rows, int64_t head_size, float* out) {
  for (int64_t d = 0; d < head_size; ++d)
    for (int64_t j = 0; j < kBlock; ++j) out[d * kBlock + j] = j < rows ? x[j * head_size + d] : 0.0f;
}

struct Packed {  // transposed key blocks (and value blocks, for the backward pass): [K, m blocks, D, 64]
  Buffer blocks;
  Packed(const Problem& p, const float* x, int threads) : blocks(p.kv_heads * p.k_blocks * kBlock * p.head_size) {
    const int64_t count = p.kv_heads * p.k_blocks, size = kBlock * p.head_size;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) pack_transposed(x + i * size, kBlock, p.head_size, blocks.data + i * size);
  }
};

struct ColumnTiles {  // first[row]: number of the first tile of 64 columns of (segment, pattern)
  int64_t rows;
  int64_t* first;
  explicit ColumnTiles(const Problem& p) : rows(p.column_k ? p.index.segments * p.index.patterns : 0) {
    first = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * (rows + 1)));
    first[0] = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t columns = p.index.column_ptr[r + 1] - p.index.column_ptr[r];
      first[r + 1] = first[r] + (columns + kBlock - 1) / kBlock;
    }
  }
  ~ColumnTiles() { std::free(first); }
  ColumnTiles(const ColumnTiles&) = delete;
  ColumnTiles& operator=(const ColumnTiles&) = delete;
};

struct PackedColumns {  // transposed columns, tile after tile: [tiles, D, 64]
  Buffer tiles;
  PackedColumns(const Problem& p, const ColumnTiles& layout, const float* x, int threads)
      : tiles(layout.first[layout.rows] * kBlock * p.head_size) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t r = 0; r < layout.rows; ++r) {
      const int64_t begin = p.index.column_ptr[r], end = p.index.column_ptr[r + 1];
      for (int64_t t = layout.first[r]; t < layout.first[r + 1]; ++t) {
        const int64_t at = begin + (t - layout.first[r]) * kBlock;
        const int64_t count = end - at < kBlock ? end - at : kBlock;
        pack_transposed(x + at * p.head_size, count, p.head_size, tiles.data + t * kBlock * p.head_size);
      }
    }
  }
};

struct QueryBlock {
  int64_t local, global, segment;
};

// Local key blocks that a query block reads, ascending by offset; `diagonal` is the position of its own block or -1.
struct KeyBlocks {
  int64_t count = 0, diagonal = -1;
  int64_t* local;
  explicit KeyBlocks(const Problem& p) : local(static_cast<int64_t*>(std::malloc(sizeof(int64_t) * (p.k_blocks + 1)))) {}
  ~KeyBlocks() { std::free(local); }
  KeyBlocks(const KeyBlocks&) = delete;
  KeyBlocks& operator=(const KeyBlocks&) = delete;

  void add(const Problem& p, int64_t key, int64_t query, int64_t document_begin) {
    const int64_t offset = key - p.k_start;
    if (key < document_begin || offset < 0 || offset % p.k_stride != 0 || offset / p.k_stride >= p.k_blocks) return;
    if (key == query) diagonal = count;
    local[count++] = offset / p.k_stride;
  }

  void find(const Problem& p, const QueryBlock& q, int64_t pattern) {
    const Index& index = p.index;
    const Segment& segment = index.segment[q.segment];
    count = 0, diagonal = -1;
    if (index.kind == IndexKind::kFull) {
      const int64_t first = segment.is_padding ? q.global : segment.document_begin;
      int64_t j = first > p.k_start ? (first - p.k_start + p.k_stride - 1) / p.k_stride : 0;
      for (; j < p.k_blocks && p.k_start + j * p.k_stride <= q.global; ++j)
        add(p, p.k_start + j * p.k_stride, q.global, first);
    } else if (index.kind == IndexKind::kVerticalSlash) {
      const int64_t row = q.segment * index.patterns + pattern;
      for (int64_t i = index.diagonal_ptr[row]; i < index.diagonal_ptr[row + 1]; ++i)
        add(p, q.global - index.diagonals[i], q.global, segment.document_begin);
    } else {
      const int64_t row = pattern * index.blocks + q.global;
      for (int64_t i = index.block_ptr[row]; i < index.block_ptr[row + 1]; ++i)
        add(p, index.block_values[i], q.global, segment.document_begin);
    }
  }
};

// counted[c]: column c of the tile is in an earlier block, and no active diagonal covers it. Returns how many.
inline int64_t count_columns(const int64_t* columns, int64_t size, const QueryBlock& q, const int64_t* diagonals,
                             int64_t diagonal_count, bool* counted) {
  int64_t total = 0, at = diagonal_count - 1;  // columns ascend, so their offsets descend along the sorted diagonals
  for (int64_t c = 0; c < size; ++c) {
    const int64_t offset = q.global - columns[c] / kBlock;
    while (at >= 0 && diagonals[at] > offset) --at;
    counted[c] = offset > 0 && !(at >= 0 && diagonals[at] == offset);
    total += counted[c];
  }
  return total;
}

inline int64_t segment_of(const Index& index, int64_t block) {
  int64_t low = 0, high = index.segments - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (block < index.segment[middle].end) high = middle;
    else low = middle + 1;
  }
  return low;
}

}  // namespace
