// Codes of 4 bits as integers, and bytes as scales. CODEBOOK is
//   1  codes of plugins/iq4.py, with its scales in the unit of a row
//   2  E2M1, with E8M0 scales
//   3  E2M1, with E4M3 scales in the unit of a row
//
// Integers are twice the numbers of E2M1, and half of its scales multiply them.
//
// `prmt` takes four bytes of eight by four indices of three bits: of each half of the table it has the
// byte of every code, and the upper bit of a code says which of the two is the code's. The bytes are
// how much more the integers are than the least, 7 bits, and 0x4300 | n is the bf16 128 + n.
#pragma once

namespace trtc {

constexpr bool kIsIq4 = CODEBOOK == 1;
constexpr int kLeastCode = kIsIq4 ? -69 : -12;
constexpr unsigned kCodesAbove = 128 - kLeastCode;  // what 0x4300 | n has too much; a bf16 has it

// By code, a byte each.
constexpr unsigned kCodeWords[] = {kIsIq4 ? 0x23190c00u : 0x0f0e0d0cu, kIsIq4 ? 0x403a332cu : 0x18141210u,
                                   kIsIq4 ? 0x59524c46u : 0x090a0b0cu, kIsIq4 ? 0x7d716860u : 0x00040608u};

// Of the four codes in a word's lower half, a byte each.
__device__ inline unsigned bytes_of_codes(unsigned codes) {
  const unsigned index = codes & 0x7777u, which = (codes >> 1 & 0x4444u) | 0x3210u;
  const unsigned low = __byte_perm(kCodeWords[0], kCodeWords[1], index);
  const unsigned high = __byte_perm(kCodeWords[2], kCodeWords[3], index);
  return __byte_perm(low, high, which);
}

// 128 + n of the first two bytes, or of the last two, as a pair of bf16.
__device__ inline unsigned pair_of_bytes(unsigned bytes, int which) {
  return __byte_perm(bytes, 0x43434343u, which ? 0x4342 : 0x4140);
}

// The bits of the f32 that multiplies integers, of a byte: of iq4 its sign, three bits of an exponent and
// four of a mantissa; E8M0 is an exponent, of which 0 is a subnormal; E4M3 is times 2^-120 where its bits
// lie in an f32. (Where powers of two go into bf16 weights, mixed_input_fragments.cuh, a scale that is a
// subnormal counts as 0.)
__device__ inline unsigned code_scale_bits(unsigned code) {
  if (kIsIq4) return (code & 0x80u) << 24 | (code & 0x7fu) << 19 | 120u << 23;
  if (CODEBOOK == 2) return __float_as_uint(__uint_as_float(code == 0 ? 1u << 22 : code << 23) * 0.5f);
  return __float_as_uint(__uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 6.646139978924579e35f);
}

}  // namespace trtc
