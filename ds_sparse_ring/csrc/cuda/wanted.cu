// Which keys the queries want: the map for the copy engine, and which kernel does it.
#include "tensor_map.cuh"
#include "wanted.cuh"

namespace ds_sparse_ring {

cudaError_t launch_wanted(const WantedProblem& p, cudaStream_t stream) {
  if (p.heads % p.kv_heads) return cudaErrorInvalidValue;
  static const Encoder encoder = find_encoder();
  if (encoder.error != cudaSuccess) return encoder.error;
  WantedArguments a;
  a.problem = p;
  cut_into_tiles(a.problem);
  if (!encode_map(encoder.encode, &a.k, map_type(p.element), p.head_size, p.k, p.tokens, p.k_row, p.kv_heads, p.k_head))
    return cudaErrorInvalidValue;
  if (p.element == kBfloat16 && p.head_size == 128) return launch_wanted<kBfloat16, 128>(a, stream);
  if (p.element == kBfloat16 && p.head_size == 64) return launch_wanted<kBfloat16, 64>(a, stream);
  if (p.element == kFloat16 && p.head_size == 128) return launch_wanted<kFloat16, 128>(a, stream);
  if (p.element == kFloat16 && p.head_size == 64) return launch_wanted<kFloat16, 64>(a, stream);
  return cudaErrorInvalidValue;
}

}  // namespace ds_sparse_ring
