// The kernels for AVX2: this file only sets the widths and the compiler's target.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "problem.h"

// After the standard headers: see simd.h.
#pragma GCC target("avx2,fma")
#define DSR_WIDTH 8    // floats per vector
#define DSR_ROWS 6      // rows and vectors of accumulators: as many as the registers hold
#define DSR_VECTORS 2

#include "simd.h"
#include "gemm.h"
#include "tiles.h"
#include "attention.h"

namespace ds_sparse_ring::avx2 {

void forward(const Problem& p, const ForwardOutput& out, int threads) { forward_all(p, out, threads); }

void backward(const Problem& p, const BackwardInput& in, const BackwardOutput& out, int threads) {
  backward_all(p, in, out, threads);
}

}  // namespace ds_sparse_ring::avx2
