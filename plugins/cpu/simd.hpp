// Sixteen lanes of float or int32, on the instruction set that the compiler targets.
//
// A row of a panel of weights is sixteen columns wide, and its sums stay in registers for thousands
// of steps: these types are what the innermost loops of matrix products are written in (vector.hpp
// is for everything else). The three implementations have the same functions:
//   TRTC_AVX512   AVX-512 F/BW/DQ/VL with VNNI and BF16: one register; adds dot_bf16
//   TRTC_AVX2     AVX2 and FMA: two registers; adds sums of nibbles' products in words
//   otherwise     plain loops
// Products of codes take a part of a block at a time, each with a cell of its own: nibbles the low and
// the high ones, bytes what byte_part gives (all of it, or as words when kBytesAreWords).
// Results may differ in the last bits between them (fused or separate multiply-add, bf16 pairs),
// never between calls of one build.
#pragma once

// Sums that a lambda captures stay in registers only if nothing is called. Without optimisation none
// do, and inlining everything takes the compiler half as long again.
#ifdef __OPTIMIZE__
#define TRTC_INLINE [[gnu::always_inline]] inline
#define TRTC_INLINE_LAMBDA __attribute__((always_inline))
#else
#define TRTC_INLINE inline
#define TRTC_INLINE_LAMBDA
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TRTC_AVX512 1
#include "simd_avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__)
#define TRTC_AVX2 1
#include "simd_avx2.hpp"
#else
#include "simd_scalar.hpp"
#endif
