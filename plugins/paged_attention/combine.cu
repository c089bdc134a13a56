// Combines the partial results that split.cu wrote for each split of a sequence's keys.
//
// Macros: those of context.cuh, and HEADS (of a program) HAS_COUNTER.
#include "gpu/quantize.cuh"
#include "paged_attention/context.cuh"

namespace trtc {

constexpr int kThreads = 128;
constexpr int kHeadThreads = HEAD_DIM / 4;
constexpr int kAtOnce = 4;  // splits that are loaded together
static_assert(HEADS * kHeadThreads <= kThreads);

// What hands out the tiles of the prefill kernel that is launched next.
#if HAS_COUNTER
#define COUNTER_PARAMETER int *counter,
#else
#define COUNTER_PARAMETER
constexpr int* counter = nullptr;
#endif

}  // namespace trtc

using namespace trtc;

// Grid: (ceil(NUM_HEADS / HEADS), sequences, 1).
extern "C" __global__ void __launch_bounds__(kThreads)
attention_combine(const int* query_start, const int* context_lens, V_SCALE_PARAMETER
                  PRE_SCALE_PARAMETER OUT_SCALE_PARAMETER SINKS_PARAMETER COUNTER_PARAMETER
                  const int* dims,
                  const float* partial, const float2* stats, Out* out) {
  let_next_kernel_start();
  const int sequence = blockIdx.y;
  const int head = blockIdx.x * HEADS + threadIdx.x / kHeadThreads;
  const int d = threadIdx.x % kHeadThreads * 4;
  bool idle = sequence >= dims[1] || threadIdx.x >= HEADS * kHeadThreads ||
              head >= NUM_HEADS;
  int row = 0, context = 1;
  if (!idle) {
    row = query_start[sequence];
    context = context_lens[sequence];
    idle = query_start[sequence + 1] - row != 1;
  }
  const int count = Splits(context).count;
  wait_for_earlier_kernels();
  if (counter != nullptr && blockIdx.x + blockIdx.y + threadIdx.x == 0) *counter = 0;
  if (idle || count == 1) return;

  // The sink is the largest score so far, whose weight is 1.
  float largest = sink_of(sinks, head), total = sinks ? 1.f : 0.f, sum[4] = {};
  for (int begin = 0; begin < count; begin += kAtOnce) {
    float2 theirs[kAtOnce];
    float4 sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = smaller(begin + i, count - 1);
      const long long place =
          (static_cast<long long>(sequence) * MAX_SPLITS + split) * NUM_HEADS + head;
      theirs[i] = stats[place];
      sums[i] = *reinterpret_cast<const float4*>(partial + place * HEAD_DIM + d);
      if (begin + i >= count) theirs[i].x = -infinity();
    }
    float most = largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, theirs[i].x);
    const float shrink = exp2_approx(largest - most);
    largest = most;
    total *= shrink;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] *= shrink;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float share = exp2_approx(theirs[i].x - most);
      total += share * theirs[i].y;
      sum[0] += share * sums[i].x;
      sum[1] += share * sums[i].y;
      sum[2] += share * sums[i].z;
      sum[3] += share * sums[i].w;
    }
  }
  const float by = value_or_one(v_scale) / total;
  const float result[4] = {sum[0] * by, sum[1] * by, sum[2] * by, sum[3] * by};
  Quantizer<Out>(pre_scale, out_scale)
      .store(out + static_cast<long long>(row) * OUT_STRIDE, head * HEAD_DIM + d, result);
}
