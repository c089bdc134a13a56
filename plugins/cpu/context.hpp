// What a kernel is given besides its tensors: the thread pool and scratch memory.
//
// A kernel that needs scratch memory has, beside `template <class C> void NAME(Context&, ...)`,
//
//   template <class C> std::size_t NAME_scratch(std::int64_t max_rows, int num_threads);
//
// the bytes of ONE area, shared by all threads, that suffice for any call of up to max_rows rows
// (the first row axis) on that many threads. Generated code takes the largest at create time and
// hands every call the same area; its contents do not survive a call. Kernels never allocate.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_pool.hpp"

namespace trtc {

struct Context {
  ThreadPool& threads;
  std::byte* scratch;  // 64-byte aligned
  std::size_t scratch_bytes;
  // Of each row of the step's result only the argmax and the maximum will be read.
  bool only_largest = false;
};

// The fewest rows of a row-wise kernel that go to another thread: a few microseconds of work.
constexpr std::int64_t rows_a_part(std::int64_t columns) {
  constexpr std::int64_t kElements = 16384;
  return columns >= kElements ? 1 : kElements / columns;
}

// Cuts a scratch area into 64-byte aligned parts. Without an area it only adds up what is needed.
class Carver {
 public:
  explicit Carver(std::byte* area = nullptr) : area_(area) {}

  template <class T>
  T* take(std::int64_t count) {
    std::byte* part = area_ == nullptr ? nullptr : area_ + bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(part);
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* area_;
  std::size_t bytes_ = 0;
};

}  // namespace trtc
