// Vertical-slash attention, forward: maps for the copy engine, and which kernel does it.
#include "forward.cuh"
#include "tensor_map.cuh"

namespace ds_sparse_ring {

cudaError_t launch_forward(const ForwardProblem& p, int multiprocessors, cudaStream_t stream) {
  const int64_t q_rows = int64_t{p.q_blocks} * kBlock, k_rows = int64_t{p.k_blocks} * kBlock;
  if (p.heads % p.kv_heads || p.heads / p.kv_heads % p.heads_together) return cudaErrorInvalidValue;
  static const Encoder encoder = find_encoder();
  if (encoder.error != cudaSuccess) return encoder.error;
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_stride) {
    return encode_map(encoder.encode, map, map_type(p.element), p.head_size, data, rows, row_stride, heads, head_stride);
  };
  ForwardArguments a;
  a.problem = p;
  bool encoded = encode(&a.q, p.q, q_rows, p.q_row, p.heads, p.q_head) && encode(&a.k, p.k, k_rows, p.k_row, p.kv_heads, p.k_head) &&
                 encode(&a.v, p.v, k_rows, p.v_row, p.kv_heads, p.v_head);
  if (p.columns > 0) {
    encoded = encoded && encode(&a.column_k, p.column_k, p.columns, p.column_k_row, 1, p.columns * p.column_k_row) &&
              encode(&a.column_v, p.column_v, p.columns, p.column_v_row, 1, p.columns * p.column_v_row);
  } else {
    a.column_k = a.k, a.column_v = a.v;
    a.problem.tables.column_ptr = nullptr;
  }
  if (!encoded) return cudaErrorInvalidValue;
  const cudaError_t error = cudaMemsetAsync(p.next_tile, 0, sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  if (p.element == kBfloat16 && p.head_size == 128) return launch_forward<kBfloat16, 128>(a, multiprocessors, stream);
  if (p.element == kBfloat16 && p.head_size == 64) return launch_forward<kBfloat16, 64>(a, multiprocessors, stream);
  if (p.element == kFloat16 && p.head_size == 128) return launch_forward<kFloat16, 128>(a, multiprocessors, stream);
  if (p.element == kFloat16 && p.head_size == 64) return launch_forward<kFloat16, 64>(a, multiprocessors, stream);
  return cudaErrorInvalidValue;
}

}  // namespace ds_sparse_ring
