#include "forward_kernel.cuh"

template cudaError_t ds_sparse_ring::launch_forward<ds_sparse_ring::kBfloat16, 64>(const ForwardArguments&, int, cudaStream_t);
