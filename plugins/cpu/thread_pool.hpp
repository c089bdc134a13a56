// A pinned thread pool that spins briefly, then sleeps, and never waits for a thread that the
// system has not scheduled.
//
// Kernels run back to back with barriers microseconds apart, so a sleeping worker would cost more
// than its work; but an engine that idles must not burn its cores. The parts of a task are claimed
// one by one: when other processes hold the cores, the threads that do run take over the parts of
// those that don't, and a late worker finds nothing left.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
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
  // cpus: one logical CPU a thread, or empty to leave placement to the system. The caller is
  // thread 0 and is never pinned, whatever cpus[0] says: it belongs to the host process.
  explicit ThreadPool(int num_threads, const std::vector<int>& cpus = {}) : size_(num_threads < 1 ? 1 : num_threads) {
    try {
      for (int i = 1; i < size_; ++i) {
        workers_.emplace_back([this, i] { work(i); });
        if (i < static_cast<int>(cpus.size())) pin(workers_.back(), cpus[i]);
      }
    } catch (...) {
      stop();  // the system refused a thread: those it gave must be joined before they are forgotten
      throw;
    }
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  ~ThreadPool() { stop(); }

  int size() const { return size_; }

  // Calls body(part, thread) once for each part in [0, parts) and returns when all have returned.
  // Parts go to whichever thread is free, in no order; calls with the same `thread` never overlap,
  // so it may index scratch memory. Only one thread may call, and no body may call back.
  template <class Body>
  void for_each(std::int64_t parts, Body&& body) {
    if (parts <= 1 || size_ == 1) {
      for (std::int64_t part = 0; part < parts; ++part) body(part, 0);
      return;
    }
    using Plain = std::remove_reference_t<Body>;
    share([](void* closure, std::int64_t part, int thread) { (*static_cast<Plain*>(closure))(part, thread); },
          const_cast<void*>(static_cast<const void*>(&body)), parts);
  }

  // Calls task(i) once for each i in [0, size()): i may index scratch memory.
  template <class Task>
  void run(Task&& task) {
    for_each(size_, [&](std::int64_t part, int) { task(static_cast<int>(part)); });
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
    const Cuts cuts(count, grain, grains, size_);
    for_each(cuts.parts(), [&](std::int64_t part, int thread) { body(cuts.at(part), cuts.at(part + 1), thread); });
  }

 private:
  using Call = void (*)(void* closure, std::int64_t part, int thread);

  // What for_each does with several threads; once for all bodies, each of which is a type.
  [[gnu::noinline]] void share(Call call, void* closure, std::int64_t parts) {
    call_ = call;
    closure_ = closure;
    unfinished_.store(parts, std::memory_order_relaxed);
    const std::uint64_t round = (unclaimed_.load(std::memory_order_relaxed) & ~kCountMask) + kCountMask + 1;
    parts_ = parts;
    unclaimed_.store(round | static_cast<std::uint64_t>(parts), std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    drain(0);
    await([&] { return unfinished_.load(std::memory_order_acquire) == 0; }, [] { sched_yield(); });
  }

  void stop() {
    stop_.store(true, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  static void pin(std::thread& worker, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    // Pinning is a hint: failure for a CPU that the process may not use is ignored.
    pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);
  }

  // Enough that a thread which loses its core to another process delays the others little. A round
  // takes half of what is left, the last one all: threads that are out of step end together.
  static constexpr int kPartsPerRound = 2;  // and thread
  static constexpr int kRounds = 4;

  // Where parallel_for cuts [0, count) into parts.
  class Cuts {
   public:
    Cuts(std::int64_t count, std::int64_t grain, std::int64_t grains, int threads)
        : count_(count), grain_(grain), grains_(grains), round_(std::int64_t{kPartsPerRound} * threads) {}

    std::int64_t parts() const { return is_fine() ? round_ * kRounds : grains_ < round_ ? grains_ : round_; }

    // Where part number `part` begins, and the one before it ends.
    std::int64_t at(std::int64_t part) const {
      const std::int64_t begin = (is_fine() ? in_rounds(part) : grains_ * part / parts()) * grain_;
      return begin < count_ ? begin : count_;
    }

   private:
    bool is_fine() const { return grains_ >= round_ * kRounds; }

    std::int64_t in_rounds(std::int64_t part) const {
      constexpr std::int64_t kStart[] = {0, 4, 6, 7, 8}, kShare[] = {4, 2, 1, 1, 0};  // eighths
      const std::int64_t number = part / round_;
      return grains_ * (kStart[number] * round_ + kShare[number] * (part % round_)) / (8 * round_);
    }

    std::int64_t count_, grain_, grains_, round_;
  };

  static constexpr std::uint64_t kCountMask = 0xffffffffu;
  // Longer than what the host does between two steps of a few sequences.
  static constexpr std::chrono::microseconds kSpin{300};

  // Spins until done() for about kSpin, then calls otherwise() between looks.
  template <class Done, class Otherwise>
  static void await(Done&& done, Otherwise&& otherwise) {
    for (int looks = 0; looks < 256; ++looks) {
      if (done()) return;
      relax();
    }
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < deadline) {
      for (int looks = 0; looks < 32; ++looks) {
        if (done()) return;
        relax();
      }
    }
    while (!done()) otherwise();
  }

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  // Claims and runs parts until none is left.
  //
  // unclaimed_ holds the round's number above the count of unclaimed parts, so a claim can only
  // succeed in the round whose count it saw; and the claimed part keeps that round, with its
  // closure, alive until it is finished.
  void drain(int thread) {
    std::uint64_t seen = unclaimed_.load(std::memory_order_acquire);
    while ((seen & kCountMask) != 0) {
      if (!unclaimed_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      // Counting down claims the first part first.
      call_(closure_, parts_ - static_cast<std::int64_t>(seen & kCountMask), thread);
      unfinished_.fetch_sub(1, std::memory_order_release);
      seen = unclaimed_.load(std::memory_order_acquire);
    }
  }

  void work(int thread) {
    for (;;) {
      const std::uint32_t seen = generation_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      drain(thread);
      await([&] { return generation_.load(std::memory_order_acquire) != seen; },
            [&] { generation_.wait(seen, std::memory_order_acquire); });
    }
  }

  int size_;
  alignas(64) std::atomic<std::uint64_t> unclaimed_{0};
  alignas(64) std::atomic<std::int64_t> unfinished_{0};
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
  Call call_ = nullptr;
  void* closure_ = nullptr;
  std::int64_t parts_ = 0;
  std::vector<std::thread> workers_;  // last: they use everything above
};

}  // namespace trtc
