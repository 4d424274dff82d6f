// The kernels for baseline: this file only sets the widths and the compiler's target.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "problem.h"

#define DSR_WIDTH 4    // floats per vector
#define DSR_ROWS 4      // rows and vectors of accumulators: as many as the registers hold
#define DSR_VECTORS 2

#include "simd.h"
#include "gemm.h"
#include "tiles.h"
#include "attention.h"

namespace ds_sparse_ring::baseline {

void forward(const Problem& p, const ForwardOutput& out, int threads) { forward_all(p, out, threads); }

void backward(const Problem& p, const BackwardInput& in, const BackwardOutput& out, int threads) {
  backward_all(p, in, out, threads);
}

}  // namespace ds_sparse_ring::baseline
