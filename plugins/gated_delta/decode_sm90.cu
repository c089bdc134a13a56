// gated_delta for steps of one token a sequence, with its norm, in one launch: bound by the states, of
// which it reads and writes 64 KB a head. For keys and values of 128 channels.
//
//     S' = decay * S + k (beta * (v - k . decay * S))^T        found = q . S'
//        = decay * S + k new^T                                       = q . decay * S + (q . k) new
//     out = quantize(rms_norm(found) * norm * gate(z))
//
// A block takes heads of the step's sequences in order. One warp is several heads ahead: it copies their
// states into a ring of shared memory, and has another with q, k, v and all else that a row does to a
// state. Eight warps take a state into registers, 16 keys each, add up their parts of k . S and q . S, and
// put S' where S was; another one copies it from there to its page. A sequence has one row, or with the
// drafts behind it several, as plugins/gpu/triton.py's find_rows and page_left say.
//
// Macros: KEY_HEADS, VALUE_HEADS; DECAYS (1, or 128: one for each key channel); WRITE_SCALE; PAGE_SIZE,
// TABLE_WIDTH; STATE_STRIDE, QKV_STRIDE, Z_STRIDE, A_STRIDE, B_STRIDE, OUT_STRIDE (elements); EPS;
// SIGMOID_GATE (else silu); OUT_TYPE; HAS_PRE_SCALE, HAS_OUT_SCALE (0 or 1); BLOCKS, STAGES, SHARED_BYTES.
#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"
#include "gpu/quantize.cuh"
#include "gpu/tensor_map.cuh"
#include "gpu/turn.cuh"
#include "gpu/warp.cuh"

namespace {

using namespace trtc;

constexpr int kWidth = 128;  // channels of a key, and of a value
constexpr int kWarps = 8, kConsumers = 32 * kWarps, kThreads = kConsumers + 64;
constexpr int kKeys = kWidth / kWarps;  // of a warp
constexpr int kStateBytes = kWidth * kWidth * 4, kCopies = 4;
constexpr int kKeysOfHeads = KEY_HEADS * kWidth;
constexpr int kEntries = STAGES + 1;

// Where a row's state comes from: it is the one in registers, or the next in the ring, or zeros, which take
// the next place in the ring too, as the end does.
enum class From { kRegisters, kRing, kNothing, kEnd };

// What a row does to a head's state, by key channel and by column.
struct Entry {
  alignas(16) float q[kWidth], k[kWidth], v[kWidth], gate[kWidth];
#if DECAYS > 1
  float decays[kWidth];
#endif
  float decay, beta, q_by_k;
  From from;
  int row, head;
  bool is_last;    // of its sequence
  long long page;  // where the state is left; -1: the next row leaves its own there
};

struct Shared {
  alignas(128) float states[STAGES][kWidth][kWidth];
  Entry entries[kEntries];
  float4 parts[2][2][kWarps][32];  // by turn; of k . S and of q . S
  float* targets[STAGES];  // of states that are done; null: there is no other
  unsigned long long states_full[STAGES], states_done[STAGES], states_empty[STAGES];
  unsigned long long entries_full[kEntries], entries_empty[kEntries];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// Rows of a sequence and the drafts behind it, none for such a draft, and the page with the state that
// they go on from; -1: they are a sequence's first tokens.
struct Rows {
  int first, last;
  long long page;
};

struct Tables {
  const int *query_start, *context_lens, *page_table, *slots;
  int sequences;

  // The page that a sequence's rows from `row` on, the first at `position`, go on from, and whether that
  // is the state of the row before.
  __device__ inline int page_of(int sequence, int row, int position, bool& follows) const {
    const int* const table = page_table + static_cast<long long>(sequence) * TABLE_WIDTH;
    const int page = table[(position > 1 ? position - 1 : 0) / PAGE_SIZE];
    follows = false;
    if (sequence == 0 || position < 1) return page;
    follows = slots[row - 1] / PAGE_SIZE == page;
    return follows ? (table - TABLE_WIDTH)[(position > 1 ? position - 2 : 0) / PAGE_SIZE] : page;
  }

  __device__ inline Rows rows_of(int sequence) const {
    const int first = query_start[sequence];
    int last = query_start[sequence + 1];
    const int position = context_lens[sequence] - (last - first);
    bool follows;
    const int page = page_of(sequence, first, position, follows);
    if (follows) return {first, first, page};
    while (++sequence < sequences) {
      const int end = query_start[sequence + 1];
      page_of(sequence, last, context_lens[sequence] - (end - last), follows);
      if (!follows) break;
      last = end;
    }
    return {first, last, position > 0 ? page : -1};
  }

  // Where a row leaves its state; -1: the next one leaves its own there.
  __device__ inline long long page_left(int row, int last) const {
    const int page = slots[row] / PAGE_SIZE;
    return row + 1 < last && slots[row + 1] / PAGE_SIZE == page ? -1 : page;
  }
};

// The heads that a block takes, of all sequences' one after the other.
struct Items {
  int at, end;

  __device__ inline explicit Items(int sequences) {
    const long long all = static_cast<long long>(sequences) * VALUE_HEADS;
    at = static_cast<int>(all * static_cast<int>(blockIdx.x) / BLOCKS);
    end = static_cast<int>(all * (static_cast<int>(blockIdx.x) + 1) / BLOCKS);
  }
};

// Four neighbouring numbers of a lane.
struct Lane {
  float of[4];

  __device__ inline explicit Lane(const Bf16* from) {
    const Four<Bf16> four = reinterpret_cast<const Four<Bf16>*>(from)[threadIdx.x % 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = to_float(four.element[i]);
  }
  __device__ inline void store(float (&to)[kWidth]) const {
    reinterpret_cast<float4*>(to)[threadIdx.x % 32] = {of[0], of[1], of[2], of[3]};
  }
  __device__ inline void scale_to(float length) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += of[i] * of[i];
    const float by = length / sqrtf(warp_sum(squares) + 1e-6f);
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] *= by;
  }
};

__device__ inline float softplus(float x) { return x > 20.f ? x : logf(1.f + expf(x)); }
__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

struct Inputs {
  const Bf16 *qkv, *z, *b, *a;
  const float *rate, *dt_bias, *norm;

  // By one warp.
  __device__ inline void write(Entry& entry, long long row, int head) const {
    const int key_head = head / (VALUE_HEADS / KEY_HEADS), lane = static_cast<int>(threadIdx.x) % 32;
    const Bf16* const of_row = qkv + row * QKV_STRIDE;
    Lane q(of_row + key_head * kWidth), k(of_row + kKeysOfHeads + key_head * kWidth);
    const Lane v(of_row + 2 * kKeysOfHeads + head * kWidth);
    Lane gate(z + row * Z_STRIDE + head * kWidth);
    const float beta = sigmoid(to_float(b[row * B_STRIDE + head])) * static_cast<float>(WRITE_SCALE);
#if DECAYS > 1
    Lane decay(a + row * A_STRIDE + head * kWidth);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = decay.of[i] + dt_bias[head * kWidth + lane * 4 + i];
      decay.of[i] = expf(rate[head] * softplus(x));
    }
    decay.store(entry.decays);
#else
    const float x = to_float(a[row * A_STRIDE + head]) + dt_bias[head];
    entry.decay = expf(rate[head] * softplus(x));
#endif
    q.scale_to(0.08838834764831845f);  // 128^-1/2
    k.scale_to(1.f);
    float q_by_k = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q_by_k += q.of[i] * k.of[i];
      gate.of[i] = norm[lane * 4 + i] * (SIGMOID_GATE ? 1.f : gate.of[i]) * sigmoid(gate.of[i]);
    }
    q.store(entry.q), k.store(entry.k), v.store(entry.v), gate.store(entry.gate);
    entry.q_by_k = warp_sum(q_by_k);
    entry.beta = beta;
  }
};

// The warp that is ahead: it starts copies of states, and works out what rows do to them.
struct Producer {
  Shared& shared;
  const Tables& tables;
  const Inputs& in;
  const float* state;
  Turn<STAGES> stage{};
  Turn<kEntries> turn{};

  // Into the next place of the ring, when that is free; of page -1 nothing is copied.
  __device__ inline void copy_state(long long page, int head) {
    if (threadIdx.x % 32 == 0) {
      const unsigned full = shared_address(&shared.states_full[stage.stage]);
      wait_at(shared_address(&shared.states_empty[stage.stage]), stage.parity ^ 1);
      if (page < 0) {
        arrive(full);
      } else {
        start_copies(state + page * STATE_STRIDE + head * (kWidth * kWidth), full);
      }
    }
    __syncwarp();
    stage.advance();
  }
  __device__ inline void start_copies(const float* from, unsigned full) {
    constexpr int kPart = kWidth / kCopies;
    arrive_and_expect(full, kStateBytes);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_bytes(shared_address(shared.states[stage.stage][i * kPart]), from + i * kPart * kWidth,
                 kStateBytes / kCopies, full);
    }
  }

  __device__ inline Entry& next() {
    wait_at(shared_address(&shared.entries_empty[turn.stage]), turn.parity ^ 1);
    return shared.entries[turn.stage];
  }
  __device__ inline void give() {
    arrive(shared_address(&shared.entries_full[turn.stage]));
    turn.advance();
  }

  __device__ inline void run() {
    Rows rows{};
    int known = -1;
    for (Items items(tables.sequences); items.at < items.end; ++items.at) {
      const int sequence = items.at / VALUE_HEADS, head = items.at % VALUE_HEADS;
      if (sequence != known) rows = tables.rows_of(sequence);
      known = sequence;
      const From begin = rows.page < 0 ? From::kNothing : From::kRing;
      if (rows.first < rows.last) copy_state(rows.page, head);
      for (int row = rows.first; row < rows.last; ++row) {
        Entry& entry = next();
        in.write(entry, row, head);
        entry.from = row == rows.first ? begin : From::kRegisters;
        entry.row = row;
        entry.head = head;
        entry.is_last = row + 1 == rows.last;
        entry.page = tables.page_left(row, rows.last);
        give();
      }
    }
    copy_state(-1, 0);
    next().from = From::kEnd;
    give();
  }
};

// Four of a warp's numbers by key channel, the same for all lanes.
struct Quad {
  float of[4];

  __device__ inline Quad(const float (&from)[kWidth], int first) {
    const float4 four = reinterpret_cast<const float4*>(from)[first / 4];
    of[0] = four.x, of[1] = four.y, of[2] = four.z, of[3] = four.w;
  }
};

// A thread's part of a state: 16 keys, four neighbouring columns.
struct State {
  float of[kKeys][4];

  __device__ inline void load(const float (&state)[kWidth][kWidth], int first_key) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float4 four = reinterpret_cast<const float4*>(state[first_key + i])[threadIdx.x % 32];
      of[i][0] = four.x, of[i][1] = four.y, of[i][2] = four.z, of[i][3] = four.w;
    }
  }
  __device__ inline void clear() {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) of[i][0] = of[i][1] = of[i][2] = of[i][3] = 0;
  }
  // Of what is left of it when it has decayed, the part of k . S and q . S.
  __device__ inline void decay(const Entry& entry, int first_key, float (&by_k)[4],
                               float (&by_q)[4]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int four = first_key + i / 4 * 4;
      const Quad k(entry.k, four), q(entry.q, four);
#if DECAYS > 1
      const float decay = Quad(entry.decays, four).of[i % 4];
#else
      const float decay = entry.decay;
#endif
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of[i][j] *= decay;
        by_k[j] += k.of[i % 4] * of[i][j];
        by_q[j] += q.of[i % 4] * of[i][j];
      }
    }
  }
  __device__ inline void add(const Entry& entry, int first_key, const float (&added)[4]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const Quad k(entry.k, first_key + i / 4 * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) of[i][j] += k.of[i % 4] * added[j];
    }
  }
  __device__ inline void store(float* to, int first_key) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      auto* const row = reinterpret_cast<float4*>(to + (first_key + i) * kWidth);
      row[threadIdx.x % 32] = {of[i][0], of[i][1], of[i][2], of[i][3]};
    }
  }
};

// The thread that stores states, each as soon as it is done.
__device__ inline void store_states(Shared& shared) {
  for (Turn<STAGES> stage;; stage.advance()) {
    wait_at(shared_address(&shared.states_done[stage.stage]), stage.parity);
    float* const to = shared.targets[stage.stage];
    if (to == nullptr) break;
    store_bytes(to, shared_address(shared.states[stage.stage]), kStateBytes);
    wait_for_store_reads();
    arrive(shared_address(&shared.states_empty[stage.stage]));
  }
  wait_for_stores();
}

__device__ inline void add_parts(float (&sum)[4], const float4 (&parts)[kWarps][32]) {
#pragma unroll
  for (int from = 0; from < kWarps; ++from) {
    const float4 more = parts[from][threadIdx.x % 32];
    sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
  }
}

// A row's head, by one warp, whose lanes have four columns each.
__device__ inline void store_row(const Quantizer<OUT_TYPE>& quantizer, OUT_TYPE* out,
                                 const Entry& entry, const float (&found)[4]) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) squares += found[i] * found[i];
  const float by = 1.f / sqrtf(warp_sum(squares) / kWidth + static_cast<float>(EPS));
  const int first = static_cast<int>(threadIdx.x) % 32 * 4;
  const Quad gate(entry.gate, first);
  float result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) result[i] = found[i] * by * gate.of[i];
  const int column = entry.head * kWidth + first;
  quantizer.store(out + static_cast<long long>(entry.row) * OUT_STRIDE, column, result);
}

// By every consumer: what all of them wrote of the state goes to `to`.
__device__ inline void give_state(Shared& shared, Turn<STAGES>& stage, float* to) {
  if (threadIdx.x == 0) shared.targets[stage.stage] = to;
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.states_done[stage.stage]));
  stage.advance();
}

__device__ inline void consume(Shared& shared, const Quantizer<OUT_TYPE>& quantizer, OUT_TYPE* out,
                               float* state_out) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, first_key = warp * kKeys;
  Turn<STAGES> stage;
  Turn<kEntries> turn;
  State state;
  state.clear();
  for (int number = 0;; ++number, turn.advance()) {
    wait_at(shared_address(&shared.entries_full[turn.stage]), turn.parity);
    const Entry& entry = shared.entries[turn.stage];
    if (entry.from != From::kRegisters) {
      wait_at(shared_address(&shared.states_full[stage.stage]), stage.parity);
    }
    if (entry.from == From::kEnd) break;
    if (entry.from == From::kRing) state.load(shared.states[stage.stage], first_key);
    if (entry.from == From::kNothing) state.clear();
    float by_k[4] = {}, by_q[4] = {};
    state.decay(entry, first_key, by_k, by_q);
    auto& parts = shared.parts[number % 2];
    parts[0][warp][lane] = {by_k[0], by_k[1], by_k[2], by_k[3]};
    parts[1][warp][lane] = {by_q[0], by_q[1], by_q[2], by_q[3]};
    sync_threads(1, kConsumers);
    float sum[4] = {}, added[4];
    add_parts(sum, parts[0]);
    const Quad v(entry.v, lane * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) added[j] = entry.beta * (v.of[j] - sum[j]);
    state.add(entry, first_key, added);
    float* const to = state_out + entry.page * STATE_STRIDE + entry.head * (kWidth * kWidth);
    if (entry.is_last) {
      state.store(shared.states[stage.stage][0], first_key);
      publish_to_products();  // and to copies
      give_state(shared, stage, to);
    } else if (entry.page >= 0) {
      state.store(to, first_key);
    }
    if (warp == number % kWarps) {
      float found[4] = {};
      add_parts(found, parts[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) found[j] += entry.q_by_k * added[j];
      store_row(quantizer, out, entry, found);
    }
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.entries_empty[turn.stage]));
  }
  give_state(shared, stage, nullptr);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) delta_decode(
    const Bf16* qkv, const Bf16* z, const Bf16* b, const Bf16* a, const int* query_start,
    const int* context_lens, const int* page_table, const int* slots,
    const float* __restrict__ rate, const float* __restrict__ dt_bias, const float* __restrict__ norm,
#if HAS_PRE_SCALE
    const float* __restrict__ pre_scale,
#endif
#if HAS_OUT_SCALE
    const float* __restrict__ out_scale,
#endif
    const int* dims, OUT_TYPE* out, float* state_out) {
#if !HAS_PRE_SCALE
  const float* pre_scale = nullptr;
#endif
#if !HAS_OUT_SCALE
  const float* out_scale = nullptr;
#endif
  let_next_kernel_start();
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&shared.states_full[stage]), 1);
      make_barrier(shared_address(&shared.states_done[stage]), kWarps);
      make_barrier(shared_address(&shared.states_empty[stage]), 1);
    }
    for (int entry = 0; entry < kEntries; ++entry) {
      make_barrier(shared_address(&shared.entries_full[entry]), 32);
      make_barrier(shared_address(&shared.entries_empty[entry]), kWarps);
    }
    publish_to_products();  // and to copies
  }
  __syncthreads();
  const Tables tables{query_start, context_lens, page_table, slots, dims[1]};
  wait_for_earlier_kernels();
  if (threadIdx.x == kConsumers + 32) {
    store_states(shared);
  } else if (threadIdx.x >= kConsumers + 32) {
    return;
  } else if (threadIdx.x >= kConsumers) {
    const Inputs in{qkv, z, b, a, rate, dt_bias, norm};
    Producer{shared, tables, in, state_out}.run();
  } else {
    consume(shared, {pre_scale, out_scale}, out, state_out);
  }
}
