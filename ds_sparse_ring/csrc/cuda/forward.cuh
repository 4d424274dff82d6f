// The forward kernel's launch.
#pragma once

#include <cuda_runtime.h>

#include "problem.cuh"

namespace ds_sparse_ring {

// Queues the kernel; nothing waits. An error names what the driver or the runtime refused.
cudaError_t launch_forward(const ForwardProblem& problem, int multiprocessors, cudaStream_t stream);

// The kernel of one element type and head size: forward_<type>_<size>.cu.
template <Element kElement, int kHeadSize>
cudaError_t launch_forward(const ForwardArguments& a, int multiprocessors, cudaStream_t stream);

}  // namespace ds_sparse_ring
