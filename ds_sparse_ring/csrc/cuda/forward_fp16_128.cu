#include "forward_kernel.cuh"

template cudaError_t ds_sparse_ring::launch_forward<ds_sparse_ring::kFloat16, 128>(const ForwardArguments&, int, cudaStream_t);
