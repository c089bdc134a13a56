// What this machine can do at most, by as many pinned threads as the runs have: bytes read a second
// from memory, and int8 and bf16 operations a second from registers. Prints one JSON object; an
// instruction that this CPU lacks is null.
//
//   machine THREADS SECONDS

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kBytes = std::size_t{512} << 20;  // a thread; beyond any cache
volatile std::uint64_t sink;

double now() {
  using clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

void pin(int index) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index--) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
}

// The sum over threads of units a second that `work` says it did, each thread in its own window of
// `seconds`. `prepare` is not timed; no window opens before all threads are prepared.
double rate(int threads, double seconds, const std::function<void(int)>& prepare,
            const std::function<double(int)>& work) {
  std::vector<double> rates(threads);
  std::vector<std::thread> team;
  pthread_barrier_t ready;
  pthread_barrier_init(&ready, nullptr, threads);
  for (int i = 0; i < threads; ++i) {
    team.emplace_back([&, i] {
      pin(i);
      prepare(i);
      pthread_barrier_wait(&ready);
      const double began = now();
      double done = 0;
      do done += work(i);
      while (now() - began < seconds);
      rates[i] = done / (now() - began);
    });
  }
  for (auto& member : team) member.join();
  pthread_barrier_destroy(&ready);
  double sum = 0;
  for (double each : rates) sum += each;
  return sum;
}

double read_rate(int threads, double seconds) {
  std::vector<std::uint64_t*> blocks(threads);
  auto prepare = [&](int i) {
    blocks[i] = static_cast<std::uint64_t*>(std::aligned_alloc(4096, kBytes));
    std::memset(blocks[i], i + 1, kBytes);
  };
  auto work = [&](int i) {
    constexpr std::size_t kWords = kBytes / 8, kLane = 64;
    std::uint64_t sums[kLane] = {};
    const std::uint64_t* words = blocks[i];
    for (std::size_t at = 0; at < kWords; at += kLane)
      for (std::size_t lane = 0; lane < kLane; ++lane) sums[lane] ^= words[at + lane];
    for (std::uint64_t each : sums) sink = sink + each;
    return static_cast<double>(kBytes);
  };
  const double bytes = rate(threads, seconds, prepare, work);
  for (auto* block : blocks) std::free(block);
  return bytes;
}

constexpr int kRounds = 100000, kChains = 16;  // enough chains to hide the latency

#ifdef __AVX512VNNI__
double int8_round(int i) {
  __m512i sums[kChains];
  for (auto& each : sums) each = _mm512_set1_epi32(i);
  const __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
  for (int round = 0; round < kRounds; ++round)
    for (auto& each : sums) each = _mm512_dpbusd_epi32(each, a, b);
  for (auto& each : sums) sink = sink + _mm512_reduce_add_epi32(each);
  return 2.0 * 64 * kChains * kRounds;
}
#endif

#ifdef __AVX512BF16__
double bf16_round(int i) {
  __m512 sums[kChains];
  for (auto& each : sums) each = _mm512_set1_ps(static_cast<float>(i));
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-6f), _mm512_set1_ps(1e-6f));
  for (int round = 0; round < kRounds; ++round)
    for (auto& each : sums) each = _mm512_dpbf16_ps(each, a, a);
  for (auto& each : sums) sink = sink + static_cast<std::uint64_t>(_mm512_reduce_add_ps(each));
  return 2.0 * 32 * kChains * kRounds;
}
#endif

void print(const char* name, double value, const char* after) {
  if (value > 0)
    std::printf("\"%s\": %.6g%s", name, value, after);
  else
    std::printf("\"%s\": null%s", name, after);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.5;
  if (threads < 1) return 2;
  const auto nothing = [](int) {};
  double int8 = 0, bf16 = 0;
#ifdef __AVX512VNNI__
  int8 = rate(threads, seconds, nothing, int8_round);
#endif
#ifdef __AVX512BF16__
  bf16 = rate(threads, seconds, nothing, bf16_round);
#endif
  (void)nothing;
  std::printf("{");
  print("read_bytes_s", read_rate(threads, seconds), ", ");
  print("int8_ops_s", int8, ", ");
  print("bf16_ops_s", bf16, "}\n");
}
