// plugins/gpu/hopper.cuh in plain C++.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

void make_barrier(unsigned barrier, int count);
void arrive(unsigned barrier);
// With late copies, they land when somebody waits at the barrier.
void arrive_when_copied(unsigned barrier);
void wait_at(unsigned barrier, unsigned parity);

void sync_threads(int number, int threads);
void arrive_at_threads(int number, int threads);

inline void publish_to_products() {}
template <int kCount>
inline void take_registers() {}
template <int kCount>
inline void give_registers() {}
inline void finish_before_waiting(float) {}
inline void begin_products() {}
template <int kCount>
inline void settle(float (&)[kCount]) {}

inline unsigned panel_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

inline unsigned long long operand_in_panels(unsigned address, unsigned panel_bytes) {
  return static_cast<unsigned long long>(panel_bytes) << 32 | address;
}

inline unsigned long long further(unsigned long long operand, unsigned bytes) {
  return operand + bytes;
}

// Element (line, along) of an operand: of a row, or of a column that runs down the panels' rows.
template <class T>
inline float element(unsigned long long operand, int row, int column) {
  const auto panel_bytes = static_cast<unsigned>(operand >> 32);
  constexpr int kColumns = 128 / sizeof(T);
  unsigned at = static_cast<unsigned>(operand) + row * 128 + column % kColumns * sizeof(T);
  at += column / kColumns * panel_bytes;
  at ^= (at >> 7 & 7) << 4;  // as the hardware swizzles addresses
  T bits;
  std::memcpy(&bits, shared_bytes + at, sizeof(T));
  return to_float(bits);
}

// Address, and the bytes along a row and to the next eight rows.
inline unsigned long long operand_in_cores(unsigned address, unsigned along_bytes,
                                           unsigned rows_bytes) {
  return static_cast<unsigned long long>(along_bytes) << 32 |
         static_cast<unsigned long long>(rows_bytes) << 48 | address;
}
inline float element_in_cores(unsigned long long operand, int row, int byte) {
  const auto along_bytes = static_cast<unsigned>(operand >> 32 & 0xffff);
  const auto rows_bytes = static_cast<unsigned>(operand >> 48);
  const unsigned at = static_cast<unsigned>(operand) + row / 8 * rows_bytes + row % 8 * 16 +
                      byte / 16 * along_bytes + byte % 16;
  return to_float(E4m3{shared_bytes[at]});
}

void commit_products();
void finish_products(int most_left);
template <int kGroups>
inline void wait_for_products() {
  finish_products(kGroups);
}

// Of an operand in shared memory.
using OperandElement = float (*)(unsigned long long operand, int row, int column);

// d = a . b, or d += a . b: 64 rows by so many columns, a depth of 32 bytes. Operands are rows.
void multiply_in_memory(float* d, int columns, int depth, OperandElement of, unsigned long long a,
                        unsigned long long b, int add);
// d = a . b, or d += a . b: a in registers, of which each has so many elements, which `element` knows,
// with element (k, column) of b by `at`.
void multiply_with_registers(float* d, int columns, const unsigned* a, int each,
                             float (*element)(unsigned word, int which), unsigned long long b,
                             OperandElement at, int add);

template <class T, int kColumns>
inline void multiply_shared(float (&d)[kColumns / 2], unsigned long long a, unsigned long long b,
                            int add) {
  multiply_in_memory(d, kColumns, 32 / sizeof(T), element<T>, a, b, add);
}

template <class T, int kColumns>
inline void multiply_registers(float (&d)[kColumns / 2], const unsigned (&a)[4],
                               unsigned long long b) {
  multiply_with_registers(d, kColumns, a, 2, half_of<T>, b, element<T>, 1);
}

template <class T, int kColumns>
inline void multiply_registers_by_rows(float (&d)[kColumns / 2], const unsigned (&a)[4],
                                       unsigned long long b) {
  const OperandElement at = [](unsigned long long operand, int k, int column) {
    return element<T>(operand, column, k);
  };
  multiply_with_registers(d, kColumns, a, 2, half_of<T>, b, at, 1);
}

template <int kColumns>
inline void multiply_registers_by_cores(float (&d)[kColumns / 2], const unsigned (&a)[4],
                                        unsigned long long b, int add) {
  const OperandElement at = [](unsigned long long operand, int k, int column) {
    return element_in_cores(operand, column, k);
  };
  multiply_with_registers(d, kColumns, a, 4, element_of<E4m3>, b, at, add);
}

}  // namespace trtc
