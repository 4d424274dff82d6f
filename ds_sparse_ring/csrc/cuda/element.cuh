// The types of queries, keys and values.
#pragma once

namespace ds_sparse_ring {

enum Element : int { kBfloat16 = 0, kFloat16 = 1 };

}  // namespace ds_sparse_ring
