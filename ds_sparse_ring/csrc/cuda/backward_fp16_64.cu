#include "backward_kernel.cuh"

template cudaError_t ds_sparse_ring::launch_backward<ds_sparse_ring::kFloat16, 64>(const BackwardArguments&, int, cudaStream_t);
