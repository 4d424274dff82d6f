// C (+)= A B for the small matrices of one tile: A is read one element at a time at any stride (so A and its transpose cost the
// same), B and C row by row in vectors. Register blocks of ROWS x VECTORS accumulators; all sizes of B's rows are multiples of 16.
#pragma once

namespace {

struct Strided {
  const float* data;
  int64_t row, column;  // distance of neighbouring rows and columns, in elements
};

template <int ROWS, int VECTORS>
inline void micro(int64_t depth, Strided a, const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  vf acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int x = 0; x < VECTORS; ++x) acc[r][x] = vf{};
  for (int64_t k = 0; k < depth; ++k) {
    vf row[VECTORS];
    for (int x = 0; x < VECTORS; ++x) row[x] = load(b + k * ldb + x * W);
    const float* column = a.data + k * a.column;
    for (int r = 0; r < ROWS; ++r) {
      const vf value = splat(column[r * a.row]);
      for (int x = 0; x < VECTORS; ++x) acc[r][x] += value * row[x];
    }
  }
  // The sum over this tile is rounded on its own and added once: a long running sum would lose a digit.
  for (int r = 0; r < ROWS; ++r)
    for (int x = 0; x < VECTORS; ++x) {
      float* at = c + r * ldc + x * W;
      store(at, accumulate ? load(at) + acc[r][x] : acc[r][x]);
    }
}

// Rows [begin, end) of a panel, ROWS at a time; returns where the next, smaller step goes on.
template <int ROWS, int VECTORS>
inline int64_t rows_of_panel(int64_t begin, int64_t end, int64_t depth, Strided a, const float* b, int64_t ldb, float* c,
                             int64_t ldc, bool accumulate) {
  const int64_t steps = (end - begin) / ROWS;
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t r = begin + i * ROWS;
    micro<ROWS, VECTORS>(depth, {a.data + r * a.row, a.row, a.column}, b, ldb, c + r * ldc, ldc, accumulate);
  }
  return begin + steps * ROWS;
}

template <int VECTORS>
inline void panel(int64_t rows, int64_t depth, Strided a, const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  int64_t r = rows_of_panel<DSR_ROWS, VECTORS>(0, rows, depth, a, b, ldb, c, ldc, accumulate);
  r = rows_of_panel<4, VECTORS>(r, rows, depth, a, b, ldb, c, ldc, accumulate);
  rows_of_panel<1, VECTORS>(r, rows, depth, a, b, ldb, c, ldc, accumulate);
}

// A: rows x depth, B: depth x columns (row-major, ldb), C: rows x columns (row-major, ldc).
inline void gemm(int64_t rows, int64_t columns, int64_t depth, Strided a, const float* b, int64_t ldb, float* c, int64_t ldc,
                 bool accumulate) {
  int64_t x = 0;
  for (; x + DSR_VECTORS * W <= columns; x += DSR_VECTORS * W)
    panel<DSR_VECTORS>(rows, depth, a, b + x, ldb, c + x, ldc, accumulate);
  for (; x < columns; x += W) panel<1>(rows, depth, a, b + x, ldb, c + x, ldc, accumulate);
}

}  // namespace
