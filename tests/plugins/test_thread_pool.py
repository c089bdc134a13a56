"""The thread pool: every part once, under stress, with more threads than cores, and pinned."""

import ctypes
import os

import numpy as np
import pytest

from tests.support.kernels import Array, build

SOURCE = """
#include <atomic>
#include <memory>
#include <vector>
#include "cpu/thread_pool.hpp"
using trtc::ThreadPool;

// Rounds of differently sized tasks back to back; returns the number of wrong counts.
extern "C" long stress(int num_threads, long rounds, long most_parts) {
  ThreadPool pool(num_threads);
  std::vector<std::atomic<int>> calls(most_parts), busy(num_threads);
  std::atomic<long> wrong{0};
  for (long round = 0; round < rounds; ++round) {
    const long parts = round * 7919 % most_parts;
    pool.for_each(parts, [&](std::int64_t part, int thread) {
      wrong += busy[thread].fetch_add(1) != 0;
      calls[part].fetch_add(1, std::memory_order_relaxed);
      busy[thread].fetch_sub(1);
    });
    for (long part = 0; part < most_parts; ++part) {
      wrong += calls[part].exchange(0) != (part < parts);
    }
  }
  return wrong;
}

// Whether every write of a task is visible after it, and to the next task on any thread.
extern "C" long chain(int num_threads, long rounds) {
  ThreadPool pool(num_threads);
  std::vector<long> values(64, 0);
  long wrong = 0;
  for (long round = 0; round < rounds; ++round) {
    pool.for_each(64, [&](std::int64_t part, int) { values[part] = values[part] + 1; });
    for (long value : values) wrong += value != round + 1;
  }
  return wrong;
}

extern "C" void cover(int num_threads, long count, long grain, long* begins, long* ends,
                      long* parts) {
  ThreadPool pool(num_threads);
  std::atomic<long> next{0};
  pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
    const long i = thread < num_threads ? next.fetch_add(1) : 1 << 30;
    begins[i] = begin;
    ends[i] = end;
  });
  *parts = next.load();
}

extern "C" long run_once_each(int num_threads) {
  ThreadPool pool(num_threads);
  std::vector<std::atomic<int>> calls(num_threads);
  for (int round = 0; round < 500; ++round) pool.run([&](int i) { calls[i].fetch_add(1); });
  long wrong = 0;
  for (auto& count : calls) wrong += count.load() != 500;
  return wrong;
}

// The CPUs that each thread may use, as bit masks of the first 64.
extern "C" void affinities(int num_threads, const int* cpus, int num_cpus, unsigned long* masks) {
  ThreadPool pool(num_threads, std::vector<int>(cpus, cpus + num_cpus));
  std::atomic<int> here{0};
  // Each part waits for the others, so each thread takes one.
  pool.for_each(num_threads, [&](std::int64_t, int thread) {
    cpu_set_t set;
    pthread_getaffinity_np(pthread_self(), sizeof set, &set);
    for (int cpu = 0; cpu < 64; ++cpu) {
      masks[thread] |= static_cast<unsigned long>(CPU_ISSET(cpu, &set)) << cpu;
    }
    here.fetch_add(1);
    while (here.load() < num_threads) sched_yield();
  });
}

// Workers are asleep by the second task.
extern "C" long wake(int num_threads, int naps) {
  ThreadPool pool(num_threads);
  std::atomic<long> done{0};
  for (int nap = 0; nap < naps; ++nap) {
    pool.for_each(32, [&](std::int64_t, int) { done.fetch_add(1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return done.load();
}

extern "C" void come_and_go(int num_threads, int times) {
  for (int i = 0; i < times; ++i) ThreadPool pool(num_threads);
}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(SOURCE, "generic")))
    for name in ("stress", "chain", "run_once_each", "wake"):
        getattr(library, name).restype = ctypes.c_long
    return library


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_part_runs_once(library, num_threads):
    rounds = 200_000 if num_threads <= (os.cpu_count() or 1) else 20_000
    assert library.stress(num_threads, ctypes.c_long(rounds), ctypes.c_long(37)) == 0


@pytest.mark.parametrize("num_threads", [2, 8])
def test_results_are_visible_to_the_next_task(library, num_threads):
    assert library.chain(num_threads, ctypes.c_long(3_000)) == 0


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_run_calls_each_index_once(library, num_threads):
    assert library.run_once_each(num_threads) == 0


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize(("count", "grain"), [(0, 8), (1, 8), (8, 8), (9, 8), (100, 7), (4096, 16)])
def test_parts_cover_the_range_at_multiples_of_the_grain(library, num_threads, count, grain):
    begins, ends = (np.zeros(count + 1, np.int64) for _ in range(2))
    parts = ctypes.c_long()
    library.cover(
        num_threads,
        ctypes.c_long(count),
        ctypes.c_long(grain),
        _pointer(begins),
        _pointer(ends),
        ctypes.byref(parts),
    )
    taken = sorted(zip(begins[: parts.value], ends[: parts.value], strict=True))
    assert all(begin % grain == 0 and begin < end for begin, end in taken)
    covered = [int(i) for begin, end in taken for i in range(begin, end)]
    assert covered == list(range(count))


def test_sleeping_workers_wake(library):
    assert library.wake(3, 50) == 50 * 32


def test_pools_come_and_go(library):
    library.come_and_go(4, 200)


def affinities(library: ctypes.CDLL, num_threads: int, cpus: list[int]) -> list[int]:
    masks = np.zeros(num_threads, np.uint64)
    array = (ctypes.c_int * len(cpus))(*cpus)
    library.affinities(num_threads, array, len(cpus), _pointer(masks))
    return [int(mask) for mask in masks]


def test_workers_are_pinned_and_the_caller_is_not(library):
    allowed = sorted(os.sched_getaffinity(0))
    everywhere = sum(1 << cpu for cpu in allowed if cpu < 64)
    last = allowed[-1]
    masks = affinities(library, 2, [allowed[0], last])
    assert masks == [everywhere, 1 << last]
    assert os.sched_getaffinity(0) == set(allowed)


def test_without_cpus_nobody_is_pinned(library):
    everywhere = sum(1 << cpu for cpu in os.sched_getaffinity(0) if cpu < 64)
    assert affinities(library, 3, []) == [everywhere] * 3


def test_a_cpu_that_does_not_exist_is_only_a_lost_hint(library):
    everywhere = sum(1 << cpu for cpu in os.sched_getaffinity(0) if cpu < 64)
    assert affinities(library, 2, [0, 5000]) == [everywhere] * 2


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
