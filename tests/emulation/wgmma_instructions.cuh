// In place of csrc/cuda/wgmma_instructions.cuh: products are queued, and computed from shared memory when they are waited for.
#pragma once

#include <deque>

#include "ptx.cuh"

namespace ds_sparse_ring {

struct Product {
  float* d;
  const uint32_t* a;
  uint64_t b;  // descriptor
  bool accumulate, across;
  int columns;
  Element element;
  uint64_t a_shared = 0;  // descriptor, if A is in shared memory
};

struct Products {  // of a thread
  std::vector<Product> open;
  std::deque<std::vector<Product>> committed;
};
inline std::vector<Products> products(emulation::kThreads);

inline void products_begin() {}

inline void products_commit() {
  Products& mine = products[block.thread];
  mine.committed.push_back(std::move(mine.open));
  mine.open.clear();
}

// entry (k, n) of an operand in shared memory
inline float operand(const Product& p, uint64_t descriptor, int k, int n) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3FFF) << 4,
                 leading = static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4,
                 stride = static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t at = p.across ? start + n / 64 * leading + n % 64 * 2 + k / 8 * stride + k % 8 * 128
                               : start + n / 8 * stride + n % 8 * 128 + k * 2;
  uint16_t bits;
  memcpy(&bits, at_shared(swizzled(at)), 2);
  return from_element(bits, p.element);
}

// a thread has rows lane / 4 and 8 below; of A, of every 8 columns two; the quad's registers make a row
inline void compute(const Product& p) {
  if (p.b >> 62 != 1) emulation::fail("a descriptor without the swizzle of 128 bytes", static_cast<uint32_t>(p.b >> 32));
  const int lane = block.thread % emulation::kLanes;
  uint64_t registers[emulation::kLanes];
  memcpy(registers, emulation::exchange(reinterpret_cast<uint64_t>(p.a)), sizeof(registers));
  for (int r = 0; r < 2; ++r) {
    float a[16];
    for (int k = 0; k < 16; ++k) {
      if (p.a_shared) {
        a[k] = operand(p, p.a_shared, k, block.thread % 128 / 32 * 16 + lane / 4 + 8 * r);
        continue;
      }
      const auto* theirs = reinterpret_cast<const uint32_t*>(registers[lane / 4 * 4 + k % 8 / 2]);
      a[k] = from_element(static_cast<uint16_t>(theirs[r + 2 * (k / 8)] >> (16 * (k % 2))), p.element);
    }
    for (int i = 0; i < p.columns / 4; ++i) {
      const int n = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
      float& d = p.d[4 * (i / 2) + 2 * r + i % 2];
      float sum = p.accumulate ? d : 0;
      for (int k = 0; k < 16; ++k) sum += a[k] * operand(p, p.b, k, n);
      d = sum;
    }
  }
  emulation::exchange(0);  // nobody changes A before all have read it
}

template <int Pending>
void products_wait() {
  auto& committed = products[block.thread].committed;
  for (uint32_t turns = block.random() % 5; turns > 0; --turns) emulation::yield();
  for (; committed.size() > Pending; committed.pop_front())
    for (const Product& p : committed.front()) compute(p);
}

template <int N>
void pin(float (&)[N]) {}
template <int N>
void pin(uint32_t (&)[N][4]) {}

template <Element kElement = kBfloat16, bool kAcross = false>
void product_64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  products[block.thread].open.push_back({d, a, b, accumulate, kAcross, 64, kElement, 0});
}

template <Element kElement>
void first_product_64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  product_64x64<kElement>(d, a, b, false);
}

template <Element kElement = kBfloat16, bool kAcross = true>
void product_64x128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  products[block.thread].open.push_back({d, a, b, accumulate, kAcross, 128, kElement, 0});
}

}  // namespace ds_sparse_ring
