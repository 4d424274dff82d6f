// Vertical-slash attention, gradients: maps for the copy engine, and which kernel does it.
#include "backward.cuh"
#include "readers.cuh"
#include "tensor_map.cuh"

namespace ds_sparse_ring {
namespace {

cudaError_t zero_queries(const BackwardProblem& p, cudaStream_t stream) {
  const size_t row = p.head_size * sizeof(float), rows = size_t(p.q_blocks) * kBlock;
  const bool dense = p.dq_row == p.head_size;
  const int heads = p.last_head - p.first_head;
  if (dense && (heads == 1 || p.dq_head == static_cast<int64_t>(rows) * p.head_size))
    return cudaMemsetAsync(p.dq, 0, heads * rows * row, stream);
  for (int head = 0; head < heads; ++head) {
    float* dq = p.dq + head * p.dq_head;
    const cudaError_t error = dense ? cudaMemsetAsync(dq, 0, rows * row, stream)
                                    : cudaMemset2DAsync(dq, p.dq_row * sizeof(float), 0, row, rows, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

bool encode_maps(EncodeTiled encode, BackwardArguments& a) {
  const BackwardProblem& p = a.problem;
  const auto type = map_type(p.element);
  const int64_t q_rows = int64_t{p.q_blocks} * kBlock, k_rows = int64_t{p.k_blocks} * kBlock;
  const int dims = p.head_size;
  const bool encoded = encode_map(encode, &a.q, type, dims, p.q, q_rows, p.q_row, p.heads, p.q_head) &&
                       encode_map(encode, &a.d_o, type, dims, p.d_o, q_rows, p.do_row, p.heads, p.do_head) &&
                       encode_map(encode, &a.k, type, dims, p.k, k_rows, p.k_row, p.kv_heads, p.k_head) &&
                       encode_map(encode, &a.v, type, dims, p.v, k_rows, p.v_row, p.kv_heads, p.v_head) &&
                       encode_map(encode, &a.dq, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, dims, p.dq, q_rows, p.dq_row, p.last_head - p.first_head,
                                  p.dq_head);
  if (p.columns > 0)
    return encoded &&
           encode_map(encode, &a.column_k, type, dims, p.column_k, p.columns, p.column_k_row, 1, p.columns * p.column_k_row) &&
           encode_map(encode, &a.column_v, type, dims, p.column_v, p.columns, p.column_v_row, 1, p.columns * p.column_v_row);
  a.column_k = a.k, a.column_v = a.v;
  a.problem.column_tiles = 0;
  return encoded;
}

}  // namespace

cudaError_t launch_backward(const BackwardProblem& p, int multiprocessors, cudaStream_t stream) {
  if (p.heads % p.kv_heads) return cudaErrorInvalidValue;
  const int group = p.heads / p.kv_heads;
  if (p.first_head < 0 || p.last_head <= p.first_head || p.last_head > p.heads || p.first_head % group || p.last_head % group)
    return cudaErrorInvalidValue;
  static const Encoder encoder = find_encoder();
  if (encoder.error != cudaSuccess) return encoder.error;
  BackwardArguments a;
  a.problem = p;
  if (!encode_maps(encoder.encode, a)) return cudaErrorInvalidValue;
  cudaError_t error = cudaMemsetAsync(p.next_tile, 0, kCounters * sizeof(int32_t), stream);
  if (error == cudaSuccess && p.overwrite_dq) error = zero_queries(p, stream);
  if (error != cudaSuccess) return error;
  a.problem.column_parts = column_parts_of(a.problem, multiprocessors);
  const int tiles = key_tiles(a.problem), blocks = tiles < multiprocessors ? tiles : multiprocessors;
  if (p.element == kBfloat16 && p.head_size == 128) return launch_backward<kBfloat16, 128>(a, blocks, stream);
  if (p.element == kBfloat16 && p.head_size == 64) return launch_backward<kBfloat16, 64>(a, blocks, stream);
  if (p.element == kFloat16 && p.head_size == 128) return launch_backward<kFloat16, 128>(a, blocks, stream);
  if (p.element == kFloat16 && p.head_size == 64) return launch_backward<kFloat16, 64>(a, blocks, stream);
  return cudaErrorInvalidValue;
}

}  // namespace ds_sparse_ring
