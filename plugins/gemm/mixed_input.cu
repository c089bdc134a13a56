// out = softcap(x @ ((weight - zero) * weight_scale).T + bias) + residual for bf16 x, 4-bit weights
// in tiles (plugins/tiles.py), row-major int8 ones or those of plugins/six_bits.py, and so few rows of x
// that reading the weights is the bound. For plugins/fused_linear, one row of x may be normalised first
// (mixed_input_norm.cuh), and halves of the result may be gate and up, of which out is the gated product.
//
// A block takes 16 * ROW_TILES rows of the weight for each of its ROW_WARPS columns of warps, and K
// is split over the SPLITS warps of a column and over the blocks of a cluster. The parts of a sum
// are added up in the order of blocks and warps, so that a result depends neither on the other rows
// of x nor on their number. Each warp streams its tiles through a ring of its own in shared memory,
// begins before it waits for the kernels before this one, and meets the others only to add up.
//
// Weights are the first operand of the tensor cores. For each 128 channels, a chunk, lane (g, t) has
// a quarter of what is scaled alike, a part, of rows g and g + 8: runs of eight channels, a word of
// nibbles, two words of bytes or parts of three words of six bits each. x is the second, and the block keeps it in shared memory in the
// order in which lanes take it. mixed_input_bf16.cuh and mixed_input_digits.cuh say what is multiplied.
//
// Macros: N, K; BYTES (int8 weights, else nibbles); SIX_BITS (or codes of 6 bits); CODEBOOK (0, or nibbles
// are codes and scales bytes, as codebook.cuh says), HAS_UNIT (0 or 1: scales are in units of scale_unit); DIGITS (products of mixed_input_digits.cuh, else of
// mixed_input_bf16.cuh); GROUP (channels that share a scale: 32, 64, or a multiple of 128), GROUPS; ROWS
// (of x at most: a power of two), ROW_TILES, ROW_WARPS, SPLITS, CLUSTER, STAGES, MIN_BLOCKS;
// X_STRIDE, OUT_STRIDE, RESIDUAL_STRIDE; OUT_TYPE, RESIDUAL_TYPE; SIGNED, HAS_ZERO, HAS_BIAS,
// HAS_RESIDUAL (0 or 1); SOFTCAP (0: none); COUNT (which of dims counts the rows); HAS_NORM,
// HAS_NORM_PRE_SCALE, EPS (of the norm); GATE (0: none, 1: silu, 2: gelu_tanh), HAS_GATE_PRE_SCALE;
// NEXT_BYTES (of the next call's weight, or 0), NEXT_SHARE (KB of each 16 KB of it that are fetched).
#include "gpu/activation.cuh"
#include "gpu/cluster.cuh"
#include "gpu/ptx.cuh"
#include "gemm/mixed_input_tiles.cuh"
#if DIGITS
#include "gemm/mixed_input_digits.cuh"
#else
#include "gemm/mixed_input_bf16.cuh"
#endif
#include "gemm/mixed_input_norm.cuh"
#include "gemm/mixed_input_operand.cuh"

namespace {

using namespace trtc;

// Stages that are on their way at most: all, where no chunk takes the place of another.
constexpr int kAhead = kSplitChunks <= STAGES ? STAGES : STAGES - 1;
constexpr int kEarly = EARLY > 0 && EARLY < kAhead ? EARLY : kAhead;
constexpr int kPartFloats = ROWS * kPartStride;

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(Bf16 x) { return to_float(x); }

// What is added to the i-th result of a block.
struct Residual {
  const RESIDUAL_TYPE* values;
  int first_n;

  __device__ inline float of(int i) const {
    const long long row = i / kBlockOut;
    return value_of(values[row * RESIDUAL_STRIDE + first_n + i % kBlockOut]);
  }
};

// Brings the first part of each 16 KB of the next call's weight to L2: what its warps load first.
__device__ inline void prefetch_next(const u8* next) {
  constexpr int kStretch = 16 << 10, kStretches = NEXT_BYTES / kStretch;
  if (threadIdx.x % 32 != 0) return;
  const int warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  for (int i = warp; i < kStretches; i += gridDim.x * (kThreads / 32)) {
    prefetch_to_l2(next + static_cast<long long>(i) * kStretch, NEXT_SHARE * 1024);
  }
}

__device__ inline void meet_cluster() {
#if CLUSTER > 1
  arrive_at_cluster();
  wait_for_cluster();
#else
  __syncthreads();
#endif
}

// A sum's parts, those of each block's warps in their order.
__device__ inline float add_parts(const float* place) {
  float total = 0.f;
#pragma unroll
  for (int from = 0; from < CLUSTER; ++from) {
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) {
      const float* part = place + i * kPartFloats;
#if CLUSTER > 1
      total += load_from_block(address_in_block(shared_address(part), from));
#else
      total += *part;
#endif
    }
  }
  return total;
}

// The result of row n of the weight, from the place of its parts.
__device__ inline float result_of(const float* place, const float* scale_unit, const float* bias, int n) {
  float total = add_parts(place);
  if (HAS_UNIT) total *= scale_unit[n];
  if (HAS_BIAS) total += bias[n];
  const float softcap = SOFTCAP;
  return softcap != 0 ? softcap * tanhf(total / softcap) : total;
}

// activation(gate) * up, times a scale, rounded where plugins/swiglu rounds.
__device__ inline float gated(float gate, float up, float pre_scale) {
  const float product = through_bf16(activated<GATE == 2>(through_bf16(gate))) * through_bf16(up);
  return HAS_GATE_PRE_SCALE ? through_bf16(product) * pre_scale : product;
}

}  // namespace

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(kThreads, MIN_BLOCKS) mixed_input_gemm(
    const Bf16* __restrict__ x,
#if HAS_NORM
    const float* __restrict__ norm_weight,
#endif
#if HAS_NORM_PRE_SCALE
    const float* __restrict__ norm_pre_scale,
#endif
    const u8* __restrict__ weight, const u8* __restrict__ weight_scale,
#if HAS_ZERO
    const u8* __restrict__ weight_zero,
#endif
#if HAS_UNIT
    const float* __restrict__ scale_unit,
#endif
#if HAS_BIAS
    const float* __restrict__ bias,
#endif
#if HAS_RESIDUAL
    const RESIDUAL_TYPE* residual,
#endif
#if HAS_GATE_PRE_SCALE
    const float* __restrict__ gate_pre_scale,
#endif
#if NEXT_BYTES
    const u8* __restrict__ next_weight,
#endif
    const int* __restrict__ dims, OUT_TYPE* out) {
#if HAS_NORM && !HAS_NORM_PRE_SCALE
  const float* norm_pre_scale = nullptr;
#endif
#if !HAS_ZERO
  const u8* weight_zero = nullptr;
#endif
#if !HAS_UNIT
  const float* scale_unit = nullptr;
#endif
#if !HAS_BIAS
  const float* bias = nullptr;
#endif
  extern __shared__ __align__(128) u8 shared_bytes[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if CLUSTER > 1
  const int rank = rank_in_cluster();
#else
  const int rank = 0;
#endif
  // The last block begins early enough to be whole, and leaves what the one before it has too: its
  // residual may be gone, where the result takes its place.
  const int block = blockIdx.x / CLUSTER;
  const int last_n = kOutColumns - kBlockOut;
  const int first_n = block * kBlockOut < last_n ? block * kBlockOut : last_n;
  const int skipped = block * kBlockOut - first_n;
  const int first_row = warp % ROW_WARPS * kWarpRows;
  const int weight_row = first_n + first_row + (first_row < kBlockOut ? 0 : kUpAfter);
  const int first_chunk = rank * kBlockChunks;
  const int begin = first_chunk + warp / ROW_WARPS * kSplitChunks;
  const int end = begin + kSplitChunks < kChunks ? begin + kSplitChunks : kChunks;
  const unsigned shared = shared_address(shared_bytes);
  const unsigned ring = shared + kRingAt + warp * STAGES * kStageBytes;
  const long long tile = weight_row / kTileRows;
  const Stream stream{weight + tile * kChunks * kTileBytes,
                      weight_scale + tile * GROUPS * kScaleBytes,
                      weight_zero + (HAS_ZERO ? tile * GROUPS * kZeroBytes : 0),
                      static_cast<unsigned>(lane), evict_first()};
  const int rows = dims[COUNT] < ROWS ? dims[COUNT] : ROWS;
  // What this thread's first result needs beside its sum comes early: the end waits for nothing then.
  const int mine = rank * kThreads + threadIdx.x;
#if HAS_NORM
  Norm norm(norm_weight);
#endif
#if HAS_GATE_PRE_SCALE
  const float first_pre_scale =
      mine < rows * kBlockOut ? load_early(gate_pre_scale + first_n + mine % kBlockOut) : 0.f;
#endif
  const auto ask_for = [&](int stage) {
    if (begin + stage < end) stream.copy(ring + stage * kStageBytes, begin + stage);
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kEarly; ++stage) ask_for(stage);
  let_next_kernel_start();
  wait_for_earlier_kernels();
#if HAS_RESIDUAL
  const Residual more{residual, first_n};
  const float first_more = mine < rows * kBlockOut ? more.of(mine) : 0.f;
#endif
  const int left = kChunks - first_chunk;
  const int num_chunks = CLUSTER == 1 ? kChunks : left < kBlockChunks ? left : kBlockChunks;
  u8* const x_shared = shared_bytes + kOperandAt;
  // Loads complete in order: x after those issued before it, which run while it is awaited.
  const auto ask_for_more = [&] {
#pragma unroll
    for (int stage = kEarly; stage < kAhead; ++stage) ask_for(stage);
#if NEXT_BYTES
    prefetch_next(next_weight);
#endif
  };
#if HAS_NORM
  norm.load(x);
  ask_for_more();
  norm.store(x_shared, reinterpret_cast<float*>(shared_bytes), norm_pre_scale,
             {first_chunk, num_chunks});
#else
  // The last blocks of a cluster may have none.
  const Operand operand{x_shared, x + first_chunk * kTileChannels,
                        CLUSTER == 1 || left > 0 ? rows : 0, num_chunks * 16};
  operand.store_all(ask_for_more);
#endif
  __syncthreads();

  Lane products(x_shared, begin - first_chunk);
  int stage = 0;
  for (int chunk = begin; chunk < end; ++chunk) {
    // All lanes have read what the stage before this one held: it takes another chunk.
    __syncwarp();
    const int free = stage == 0 ? STAGES - 1 : stage - 1;
    if (chunk + kAhead < end) stream.copy(ring + free * kStageBytes, chunk + kAhead);
    commit_copies();
    wait_for_copies<kAhead>();
    __syncwarp();
    const u8* at = shared_bytes + kRingAt + (warp * STAGES + stage) * kStageBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    products.add_chunk(at);
  }

  // All have read x and their stages for the last time: their memory takes the parts of the sums.
  float* parts = reinterpret_cast<float*>(shared_bytes);
  __syncthreads();
  products.store(parts + warp / ROW_WARPS * kPartFloats + first_row);
  meet_cluster();
  const int step = CLUSTER * kThreads;
  for (int index = mine; index < rows * kBlockOut; index += step) {
    const int row = index / kBlockOut, column = index % kBlockOut, n = first_n + column;
    if (column < skipped) continue;
    const float* const place = parts + row * kPartStride + column;
    float result = result_of(place, scale_unit, bias, n);
#if GATE
    float pre_scale = 1.f;
#if HAS_GATE_PRE_SCALE
    pre_scale = index == mine ? first_pre_scale : gate_pre_scale[n];
#endif
    const float up = result_of(place + kBlockOut, scale_unit, bias, kOutColumns + n);
    result = gated(result, up, pre_scale);
#endif
#if HAS_RESIDUAL
    result += index == mine ? first_more : more.of(index);
#endif
    out[static_cast<long long>(row) * OUT_STRIDE + n] = round_to<OUT_TYPE>(result);
  }
#if CLUSTER > 1
  meet_cluster();  // The others may still read this block's parts.
#endif
}
