// Vectors of floats in GCC's vector extension: one source for every instruction set.
//
// The including file defines DSR_WIDTH (floats per vector: 16 for AVX-512, 8 for AVX2, 4 for the baseline) and has switched the
// compiler to that instruction set. Everything below has internal linkage, so that no function compiled for a newer CPU can be
// picked by the linker for an older one; for the same reason standard headers are included before the switch.
#pragma once

namespace {

constexpr int W = DSR_WIDTH;
typedef float vf __attribute__((vector_size(DSR_WIDTH * 4)));
typedef float vf_unaligned __attribute__((vector_size(DSR_WIDTH * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(DSR_WIDTH * 4)));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline vf splat(float x) { return x - vf{}; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }

inline float reduce_max(vf x) {
  float out = x[0];
  for (int i = 1; i < W; ++i) out = x[i] > out ? x[i] : out;
  return out;
}

inline float reduce_sum(vf x) {
  float out = 0;
  for (int i = 0; i < W; ++i) out += x[i];
  return out;
}

// exp(x) for x <= 0 and a little above; below the smallest normal result, and for -inf, exactly 0; NaN for NaN. x = n ln 2 + r with
// |r| <= ln 2 / 2, a polynomial in r (Taylor coefficients; the remainder is below 2e-8 relative), then n goes into the exponent.
inline vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits
  const vf clamped = vmax(x, splat(-88.0f));
  const vf shifted = clamped * splat(1.44269504088896341f) + magic;
  const vf n = shifted - magic;
  vf r = clamped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  vf p = splat(1.0f / 5040);
  p = p * r + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  const vi power = (vi)shifted << 23;
  const vf result = x < splat(-87.0f) ? vf{} : (vf)((vi)p + power);
  return x == x ? result : x;
}

}  // namespace
