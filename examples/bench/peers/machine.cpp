// What this machine can do at most, by as many pinned threads as the runs have: bytes read a second
// from memory, and int8 and bf16 operations a second from registers. Prints one JSON object; an
// instruction that this CPU lacks is null.
//
//   machine THREADS SECONDS

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

// A loop of sixteen independent sums, enough to hide the latency. Written as assembly, because GCC 12
// copies the sums of the int8 intrinsic to other registers and back in every round. Zeros are
// multiplied: no value changes the time.
#define TRTC_TO(op, n) op " %%zmm16, %%zmm17, %%zmm" #n "\n"
#define TRTC_FOUR(op, a, b, c, d) TRTC_TO(op, a) TRTC_TO(op, b) TRTC_TO(op, c) TRTC_TO(op, d)
#define TRTC_SIXTEEN(op)                                                                   \
  TRTC_FOUR(op, 0, 1, 2, 3) TRTC_FOUR(op, 4, 5, 6, 7) TRTC_FOUR(op, 8, 9, 10, 11)          \
      TRTC_FOUR(op, 12, 13, 14, 15)
#define TRTC_LOOP(op, rounds)                                                              \
  asm volatile("vpxord %%zmm16, %%zmm16, %%zmm16\nvpxord %%zmm17, %%zmm17, %%zmm17\n"      \
               TRTC_SIXTEEN("vpxord")                                                      \
               "1:\n" TRTC_SIXTEEN(op) "dec %0\njnz 1b\n"                                 \
               : "+r"(rounds)                                                              \
               :                                                                           \
               : "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7",     \
                 "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15",     \
                 "zmm16", "zmm17")

constexpr int kRounds = 100000, kChains = 16;

#ifdef __AVX512VNNI__
double int8_round(int) {
  int rounds = kRounds;
  TRTC_LOOP("vpdpbusd", rounds);
  return 2.0 * 64 * kChains * kRounds;
}
#endif

#ifdef __AVX512BF16__
double bf16_round(int) {
  int rounds = kRounds;
  TRTC_LOOP("vdpbf16ps", rounds);
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
