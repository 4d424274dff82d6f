#include "wanted_kernel.cuh"

template cudaError_t ds_sparse_ring::launch_wanted<ds_sparse_ring::kBfloat16, 128>(const WantedArguments&, cudaStream_t);
