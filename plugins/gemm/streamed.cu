// out = softcap(x @ weight.T * weight_scale * input_scale + bias) + residual, or with row_scale, one
// number for each row of x, in place of input_scale, on the tensor cores of sm_90a, for so few rows
// that reading the weights takes most of the time, and so many that reading x for each tile of them
// would take as long.
//
// One thread issues TMA loads of the weights and one those of x, each into a ring of its own: that
// of the weights is filled before the kernels that x depends on have ended, and x, which comes from
// L2, is prefetched many segments ahead too, since it queues behind the weights.
//
// The weight is cut into tiles of 64 * ROW_GROUPS rows, and K into segments of 128 bytes. A tile is
// the work of SPLITS blocks of a cluster, which take a share of K each. In a block a team is
// ROW_GROUPS groups of four warps, which take 64 rows of a tile each; segment s of its share is
// multiplied by team s % TEAMS. Where that makes several parts of a sum, each team adds up all parts
// of its share of the rows of x, in their order: a result depends neither on the other rows of x nor
// on their number.
//
// Macros: N (a multiple of 16), K; E4M3 (weights and x, else bf16); ROWS (of x at most: 16, 32, 64,
// 128, 192, 256), ROW_GROUPS, TEAMS, SPLITS (as CLUSTER); STAGES, X_STAGES; CLUSTERS (which take every
// so many-th tile; with several parts one tile each); RUN (segments that are summed by the tensor
// cores before f32 sums take them, 0: all); OUT_STRIDE, RESIDUAL_STRIDE; OUT_F32, RESIDUAL_F32,
// HAS_WEIGHT_SCALE, HAS_INPUT_SCALE, HAS_BIAS, HAS_RESIDUAL, HAS_ROW_SCALE (0 or 1); SCALE_BYTES (of
// all rows' scales, in whole 16); SOFTCAP (0: none); COUNT (which of dims counts the rows); SHARED_BYTES; GATED (1: out is what gemm/streamed_gated.cuh says).
#include "gpu/cluster.cuh"
#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"
#include "gpu/tensor_map.cuh"
#include "gpu/turn.cuh"
#if GATED
#include "gemm/streamed_gated.cuh"
#endif

namespace {

using namespace trtc;

#if E4M3
using Element = E4m3;
#else
using Element = Bf16;
#endif
constexpr int kGroupThreads = 128, kGroupRows = 64, kSegmentBytes = 128;
constexpr int kTeamThreads = ROW_GROUPS * kGroupThreads;
constexpr int kConsumers = TEAMS * kTeamThreads;
constexpr bool kHandsOn = ROWS > 128 && kConsumers > kGroupThreads;  // registers, as warpgroups do
constexpr int kThreads = kConsumers + (kHandsOn ? kGroupThreads : 64);
constexpr int kTileRows = ROW_GROUPS * kGroupRows;
constexpr int kTiles = (N + kTileRows - 1) / kTileRows;
constexpr int kSegments = (K * sizeof(Element) + kSegmentBytes - 1) / kSegmentBytes;
constexpr int kWeightBytes = kTileRows * kSegmentBytes, kXBytes = ROWS * kSegmentBytes;
constexpr int kSums = ROWS / 2;  // a thread's
constexpr int kParts = SPLITS * TEAMS, kOwned = kSums / kParts;
static_assert(SPLITS == CLUSTER && kOwned % 4 == 0 && kSegments >= kParts);
static_assert(kParts == 1 || CLUSTERS >= kTiles);
static_assert(STAGES > TEAMS && X_STAGES > TEAMS);  // a team still has its last when it waits

struct Shared {
  alignas(1024) unsigned char weights[STAGES][kWeightBytes];
  unsigned char x[X_STAGES][kXBytes];
#if HAS_ROW_SCALE
  float row_scales[ROWS];  // with the first of x: a tile's end would wait for each of them
#endif
  unsigned long long weights_full[STAGES], weights_empty[STAGES];
  unsigned long long x_full[X_STAGES], x_empty[X_STAGES];
#if GATED
  Outbox<2 * kOwned> outboxes[TEAMS * ROW_GROUPS];
#endif
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// Parts of sums that this block adds up, where its rings were: by team, part and four of a thread's.
struct Parts {
  float4 sums[TEAMS][kParts][kOwned / 4][kTeamThreads];
};
static_assert(kParts == 1 || sizeof(Parts) <= sizeof(Shared::weights) + sizeof(Shared::x));

// A block's share of K, of every tile it takes.
struct Share {
  int first_tile, begin, end;

  __device__ inline explicit Share(int split)
      : first_tile(static_cast<int>(blockIdx.x) / SPLITS),
        begin(split * kSegments / SPLITS),
        end((split + 1) * kSegments / SPLITS) {}
};

__device__ inline void copy_weights(Shared& shared, const Share& share, const TensorMap* map) {
  const unsigned long long policy = evict_first();
  Turn<STAGES> turn;
  for (int tile = share.first_tile; tile < kTiles; tile += CLUSTERS) {
#pragma unroll 1
    for (int segment = share.begin; segment < share.end; ++segment, turn.advance()) {
      const unsigned full = shared_address(&shared.weights_full[turn.stage]);
      wait_at(shared_address(&shared.weights_empty[turn.stage]), turn.parity ^ 1);
      arrive_and_expect(full, kWeightBytes);
      stream_tile(shared_address(shared.weights[turn.stage]), map, full, segment * kSegmentBytes,
                  tile * (kTileRows / 16), policy);
    }
  }
}

__device__ inline void copy_x(Shared& shared, const Share& share, const TensorMap* map,
                              [[maybe_unused]] const float* row_scale) {
  Turn<X_STAGES> turn;
  unsigned beside = SCALE_BYTES;
  for (int tile = share.first_tile; tile < kTiles; tile += CLUSTERS) {
#pragma unroll 1
    for (int segment = share.begin; segment < share.end; ++segment, turn.advance()) {
      const unsigned full = shared_address(&shared.x_full[turn.stage]);
      wait_at(shared_address(&shared.x_empty[turn.stage]), turn.parity ^ 1);
      arrive_and_expect(full, kXBytes + beside);
#if HAS_ROW_SCALE
      if (beside > 0) copy_bytes(shared_address(shared.row_scales), row_scale, beside, full);
      beside = 0;
#endif
      copy_tile(shared_address(shared.x[turn.stage]), map, full, segment * kSegmentBytes, 0);
    }
  }
}

// A group's way through the segments. All teams go through all stages; each multiplies its own.
struct Consumer {
  Shared& shared;
  const Share& share;
  int team, group;
  Turn<STAGES> turn;
  Turn<X_STAGES> x_turn;
  int stage = 0, x_stage = 0;  // of the last products begun

  __device__ inline void skip(int segments) {
#pragma unroll
    for (int i = 0; i < segments; ++i) {
      turn.advance();
      x_turn.advance();
    }
  }

  __device__ inline void begin(float (&sums)[kSums], bool add) {
    wait_at(shared_address(&shared.weights_full[turn.stage]), turn.parity);
    wait_at(shared_address(&shared.x_full[x_turn.stage]), x_turn.parity);
    const unsigned rows = group * kGroupRows * kSegmentBytes;
    const auto weights = operand_in_panels(shared_address(shared.weights[turn.stage]) + rows, 0);
    const auto x = operand_in_panels(shared_address(shared.x[x_turn.stage]), 0);
    begin_products();
#pragma unroll
    for (int bytes = 0; bytes < kSegmentBytes; bytes += 32) {
      multiply_shared<Element, ROWS>(sums, further(weights, bytes), further(x, bytes),
                                     add || bytes > 0);
    }
    commit_products();
  }

  // The last products but `kBegun` are done.
  template <int kBegun>
  __device__ inline void release() {
    wait_for_products<kBegun>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(shared_address(&shared.weights_empty[stage]));
      arrive(shared_address(&shared.x_empty[x_stage]));
    }
  }

  __device__ inline void advance() {
    stage = turn.stage;
    x_stage = x_turn.stage;
    skip(TEAMS);
  }

  // This team's sums of a tile.
  __device__ inline void multiply(float (&sums)[kSums]) {
    if (RUN > 0) return multiply_apart(sums);
    const int first = share.begin + team;
#pragma unroll 1
    for (int segment = first; segment < share.end; segment += TEAMS) {
      begin(sums, segment > first);
      if (segment > first) release<1>();
      advance();
    }
    release<0>();
    settle(sums);
  }

  // The same, RUN segments apart from the rest: of a sum of E4M3 products the tensor cores keep fewer
  // bits than f32 has, which many of them in a row would show.
  __device__ inline void multiply_apart(float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    float products[kSums];
    int run = 0;
#pragma unroll 1
    for (int segment = share.begin + team; segment < share.end; segment += TEAMS) {
      begin(products, run > 0);
      if (run > 0) release<1>();
      advance();
      if (++run == RUN || segment + TEAMS >= share.end) {
        release<0>();
        settle(products);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += products[i];
        run = 0;
      }
    }
  }
};

// The parts of all teams of all blocks of a tile, to whom they belong and from there in their order.
struct Exchange {
  Parts& parts;
  int part, team, thread;

  __device__ inline void give(const float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const int owner = i / kOwned;
      float4& to = parts.sums[owner % TEAMS][part][i % kOwned / 4][thread];
      const float4 four = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
      if (SPLITS == 1) {
        to = four;
      } else {
        store_in_block(address_in_block(shared_address(&to), owner / TEAMS), four);
      }
    }
  }

  __device__ inline void collect(float (&sums)[kOwned]) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) sums[i] = 0;
#pragma unroll
    for (int from = 0; from < kParts; ++from) {
#pragma unroll
      for (int i = 0; i < kOwned; i += 4) {
        const float4 four = parts.sums[team][from][i / 4][thread];
        sums[i] += four.x;
        sums[i + 1] += four.y;
        sums[i + 2] += four.z;
        sums[i + 3] += four.w;
      }
    }
  }
};

// All threads of all blocks of a tile are here.
__device__ inline void meet_blocks() {
  if (SPLITS == 1) {
    __syncthreads();
  } else {
    arrive_at_cluster();
    wait_for_cluster();
  }
}

#if !GATED
// The two neighbouring columns of out that a thread has sums of, and what belongs to them.
struct Columns {
  int first;
  float scale[2] = {1, 1}, offset[2] = {0, 0};

  // Before the tile's products, so that its end waits for nothing.
  __device__ inline Columns(int column, const float* weight_scale, const float* bias)
      : first(column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = column < N ? column + i : N - 1;
      if (HAS_WEIGHT_SCALE) scale[i] = load_early(weight_scale + at);
      if (HAS_BIAS) offset[i] = load_early(bias + at);
    }
  }
};

struct Output {
  const float *weight_scale, *bias;
  float by_input;
  const void* residual;
  const float* row_scales;  // in shared memory
  void* out;
  int rows;

  __device__ inline Columns columns(int first) const { return Columns(first, weight_scale, bias); }

  // The row of x that a thread's i-th sum is of; sums i and i + 2 are of its two columns.
  __device__ inline static int row_of(int i) {
    return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }

  // What is added to sums `first` ... of a thread, before their places are written.
  template <int kCount>
  __device__ inline void load(float (&more)[kCount], int first, const Columns& columns) const {
    if (!HAS_RESIDUAL || columns.first >= N) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % 4 >= 2 || row_of(first + i) >= rows) continue;
      const long long from = static_cast<long long>(row_of(first + i)) * RESIDUAL_STRIDE + columns.first;
      if (RESIDUAL_F32) {
        const float2 two = *reinterpret_cast<const float2*>(static_cast<const float*>(residual) + from);
        more[i] = two.x;
        more[i + 2] = two.y;
      } else {
        const unsigned two =
            *reinterpret_cast<const unsigned*>(static_cast<const Bf16*>(residual) + from);
        more[i] = __uint_as_float(two << 16);
        more[i + 2] = __uint_as_float(two & 0xffff0000u);
      }
    }
  }

  template <int kCount, int kMore>
  __device__ inline void store(const float* sums, const float (&more)[kMore], int first,
                               const Columns& columns) const {
    if (columns.first >= N) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % 4 >= 2 || row_of(first + i) >= rows) continue;
      float total[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        total[j] = sums[i + 2 * j];
        if (HAS_WEIGHT_SCALE) total[j] *= columns.scale[j];
        if (HAS_INPUT_SCALE) total[j] *= by_input;
        if (HAS_ROW_SCALE) total[j] *= row_scales[row_of(first + i)];
        if (HAS_BIAS) total[j] += columns.offset[j];
        const float softcap = SOFTCAP;
        if (softcap != 0) total[j] = softcap * tanhf(total[j] / softcap);
        if (HAS_RESIDUAL) total[j] += more[HAS_RESIDUAL ? i + 2 * j : 0];
      }
      const long long to = static_cast<long long>(row_of(first + i)) * OUT_STRIDE + columns.first;
      if (OUT_F32) {
        *reinterpret_cast<float2*>(static_cast<float*>(out) + to) = {total[0], total[1]};
      } else {
        *reinterpret_cast<unsigned*>(static_cast<Bf16*>(out) + to) = pack_bf16(total[0], total[1]);
      }
    }
  }
};
#else
using Output = GatedOutput<2 * kOwned>;
#endif

__device__ inline void consume(Shared& shared, const Share& share, const Output& output, int split) {
  const int team = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kTeamThreads, 0);
  const int thread = static_cast<int>(threadIdx.x) % kTeamThreads;
  const int group = __shfl_sync(~0u, thread / kGroupThreads, 0);
  Consumer consumer{shared, share, team, group};
  consumer.skip(team);
  for (int tile = share.first_tile; tile < kTiles; tile += CLUSTERS) {
    const int in_tile = thread / 32 * 16 + thread % 32 / 4 * 2;  // see the order of rows below
    const Columns columns = output.columns(tile * kTileRows + in_tile);
    float sums[kSums];
    consumer.multiply(sums);
    if constexpr (kParts == 1) {
      // Residuals that there are registers for.
      constexpr int kSome = ROWS > 64 && !GATED ? 8 : kSums;
#pragma unroll
      for (int i = 0; i < kSums; i += kSome) {
        float more[HAS_RESIDUAL ? kSome : 4];
        output.load(more, i, columns);
        output.store<kSome>(sums + i, more, i, columns);
      }
    } else {
      const int part = split * TEAMS + team;
      const Exchange exchange{reinterpret_cast<Parts&>(shared), part, team, thread};
      meet_blocks();
      exchange.give(sums);
      float owned[kOwned], more[HAS_RESIDUAL ? kOwned : 4];
      output.load(more, part * kOwned, columns);
      meet_blocks();
      exchange.collect(owned);
      output.store<kOwned>(owned, more, part * kOwned, columns);
      break;  // the only tile: no address need be kept for another
    }
  }
}

}  // namespace

// Rows 16 a + 2 r + b of the weight (a map of (bytes, r, b, 1, a)) lie in rows 16 a + 8 b + r of a
// stage, so that a thread's sums of a row of x are of neighbouring columns: of out, or (GATED), with
// rows 8 a + r of gate in place of those with b = 0, and of up with b = 1, of one of gate and the same
// of up. x's map is (bytes, rows).
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(kThreads, 1) streamed_linear(
#if HAS_WEIGHT_SCALE
    const float* __restrict__ weight_scale,
#endif
#if HAS_INPUT_SCALE
    const float* __restrict__ input_scale,
#endif
#if HAS_BIAS
    const float* __restrict__ bias,
#endif
#if HAS_RESIDUAL
    const void* residual,
#endif
#if HAS_ROW_SCALE
    const float* row_scale,
#endif
#if HAS_OUT_SCALE
    const float* __restrict__ out_scale,
#endif
    const int* dims, void* out, const TensorMap* x, const TensorMap* weight) {
#if !HAS_WEIGHT_SCALE
  const float* weight_scale = nullptr;
#endif
#if !HAS_BIAS
  [[maybe_unused]] const float* bias = nullptr;
#endif
#if !HAS_RESIDUAL
  [[maybe_unused]] const void* residual = nullptr;
#endif
#if !HAS_ROW_SCALE
  [[maybe_unused]] const float* row_scale = nullptr;
#endif
  let_next_kernel_start();
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
#if CLUSTER > 1
  const int split = rank_in_cluster();
#else
  const int split = 0;
#endif
  if (threadIdx.x == kConsumers) {
    prefetch_map(weight);
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&shared.weights_full[stage]), 1);
      make_barrier(shared_address(&shared.weights_empty[stage]), kTeamThreads / 32);
    }
    for (int stage = 0; stage < X_STAGES; ++stage) {
      make_barrier(shared_address(&shared.x_full[stage]), 1);
      make_barrier(shared_address(&shared.x_empty[stage]), kTeamThreads / 32);
    }
    publish_to_products();  // and to TMA
  }
  __syncthreads();
  const Share share(split);
  if (threadIdx.x >= kConsumers) {
    if constexpr (kHandsOn) give_registers<40>();
    if (threadIdx.x == kConsumers) copy_weights(shared, share, weight);
    if (threadIdx.x == kConsumers + 32) {
      prefetch_map(x);
      wait_for_earlier_kernels();
      copy_x(shared, share, x, row_scale);
    }
    __syncwarp();
    if (kParts > 1) {
      meet_blocks();
      meet_blocks();
    }
  } else {
    if constexpr (kHandsOn) take_registers<232>();
#if HAS_INPUT_SCALE
    const float by_input = load_early(input_scale);
#else
    const float by_input = 1;
#endif
    const int rows = dims[COUNT];
#if HAS_ROW_SCALE
    const float* const row_scales = shared.row_scales;
#else
    const float* const row_scales = nullptr;
#endif
#if GATED
#if HAS_OUT_SCALE
    const float by_out = load_early(out_scale);
#else
    const float by_out = 1;
#endif
    const Output output{weight_scale, Unit(by_input, by_out), row_scales, out, rows, shared.outboxes};
#else
    const Output output{weight_scale, bias, by_input, residual, row_scales, out, rows};
#endif
    wait_for_earlier_kernels();
    consume(shared, share, output, split);
  }
  wait_last();
}
