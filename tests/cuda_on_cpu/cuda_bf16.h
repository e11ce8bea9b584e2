// Stands in for CUDA's header: see cuda_runtime_api.h beside it.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t wide = uint32_t(v.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  if (v != v) return {0x7fc0};
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
