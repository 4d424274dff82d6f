// In place of csrc/cuda/wgmma_shared_instructions.cuh.
#pragma once

#include "wgmma_instructions.cuh"

namespace ds_sparse_ring {

template <Element kElement, bool kAcross>
void product_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  products[block.thread].open.push_back({d, nullptr, b, accumulate, kAcross, 64, kElement, a});
}

template <Element kElement, bool kAcross>
void first_product_shared(float (&d)[32], uint64_t a, uint64_t b) {
  product_shared<kElement, kAcross>(d, a, b, false);
}

}  // namespace ds_sparse_ring
