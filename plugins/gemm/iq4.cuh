// Codes of plugins/iq4.py as numbers, and bytes as scales.
//
// `prmt` takes four bytes of eight by four indices of three bits: of each half of the table it has the
// byte of every code, and the upper bit of a code says which of the two is the code's. The bytes are
// how much more the numbers are than the least, 7 bits, and 0x4300 | n is the bf16 128 + n.
#pragma once

namespace trtc {

constexpr int kIq4Least = -69;
constexpr unsigned kIq4Over = 128 - kIq4Least;  // what 0x4300 | n has too much; a bf16 has it

// Of the four codes in a word's lower half, a byte each.
__device__ inline unsigned iq4_bytes(unsigned codes) {
  const unsigned index = codes & 0x7777u, which = (codes >> 1 & 0x4444u) | 0x3210u;
  const unsigned low = __byte_perm(0x23190c00u, 0x403a332cu, index);
  const unsigned high = __byte_perm(0x59524c46u, 0x7d716860u, index);
  return __byte_perm(low, high, which);
}

// 128 + n of the first two bytes, or of the last two, as a pair of bf16.
__device__ inline unsigned iq4_pair(unsigned bytes, int which) {
  return __byte_perm(bytes, 0x43434343u, which ? 0x4342 : 0x4140);
}

// The bits of the f32 that a byte is as a scale: its sign, three bits of an exponent and four of a mantissa.
__device__ inline unsigned iq4_scale_bits(unsigned code) {
  return (code & 0x80u) << 24 | (code & 0x7fu) << 19 | 120u << 23;
}

}  // namespace trtc
