// A pinned thread pool that spins briefly, then sleeps.
//
// Kernels run back to back with barriers microseconds apart, so a sleeping worker would cost more
// than its work; but an engine that idles must not burn its cores. The caller is thread 0.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trtc {

class ThreadPool {
 public:
  // cpus: one logical CPU a thread, or empty to leave placement to the system. The caller's own
  // thread is never pinned: it belongs to the host process.
  explicit ThreadPool(int num_threads, const std::vector<int>& cpus = {}) : size_(num_threads < 1 ? 1 : num_threads) {
    for (int i = 1; i < size_; ++i) {
      workers_.emplace_back([this, i] { work(i); });
      if (i < static_cast<int>(cpus.size())) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[i], &set);
        pthread_setaffinity_np(workers_.back().native_handle(), sizeof set, &set);
      }
    }
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  ~ThreadPool() {
    stop_.store(true, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // Calls task(thread) once on every thread and returns when all have returned.
  template <class Task>
  void run(Task&& task) {
    if (size_ == 1) {
      task(0);
      return;
    }
    using Plain = std::remove_reference_t<Task>;
    call_ = [](void* closure, int thread) { (*static_cast<Plain*>(closure))(thread); };
    closure_ = const_cast<void*>(static_cast<const void*>(&task));
    running_.store(size_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    task(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) pause(spins);
  }

  // Calls body(begin, end, thread) on contiguous parts of [0, count), multiples of `grain` but for
  // the last.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t grain, Body&& body) {
    const std::int64_t grains = (count + grain - 1) / grain;
    if (grains <= 1 || size_ == 1) {
      if (count > 0) body(std::int64_t{0}, count, 0);
      return;
    }
    run([&](int thread) {
      const std::int64_t begin = grains * thread / size_ * grain;
      std::int64_t end = grains * (thread + 1) / size_ * grain;
      if (end > count) end = count;
      if (begin < end) body(begin, end, thread);
    });
  }

 private:
  static constexpr int kSpins = 20000;  // about 100 us, longer than any gap within a step

  // Spin with back-off: on an oversubscribed machine a pure spin starves the thread waited for.
  static void pause(int spins) {
    if (spins > kSpins) {
      sched_yield();
      return;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  void work(int thread) {
    std::uint32_t seen = 0;
    for (;;) {
      std::uint32_t now = generation_.load(std::memory_order_acquire);
      for (int spins = 0; now == seen && spins < kSpins; ++spins) {
        pause(spins);
        now = generation_.load(std::memory_order_acquire);
      }
      if (now == seen) {
        generation_.wait(seen, std::memory_order_acquire);
        continue;
      }
      seen = now;
      if (stop_.load(std::memory_order_relaxed)) return;
      call_(closure_, thread);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  int size_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  std::atomic<bool> stop_{false};
  void (*call_)(void*, int) = nullptr;
  void* closure_ = nullptr;
};

}  // namespace trtc
