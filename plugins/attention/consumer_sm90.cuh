// The consumers of attention's tiles on sm_90a (attention/tiles_sm90.cuh): the running softmax, the products before
// and after it, and the store.
#pragma once

#include "attention/tiles_sm90.cuh"
#include "gpu/quantize.cuh"

namespace trtc {

// Running softmax of a consumer's two rows, g and g + 8 of its warp's 16.
struct Rows {
  float largest[2];  // score, in units of log2
  float total[2];    // of weights, of this lane's keys only
  float shrink[2];   // what was summed before the last block is worth after it: 1 if nothing grew

  // The sink of a row's head is its largest score so far, whose weight is 1, of one lane's keys.
  __device__ Rows(const Tile& tile, const float* sinks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = sink_of(sinks, tile.kv_head * kGroup + number(i) % kGroup);
      total[i] = sinks && threadIdx.x % 4 == 0 ? 1.f : 0.f;
    }
  }

  // Of the tile.
  __device__ static int number(int i) {
    return (threadIdx.x - kProducers) / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
  }

  // Whether what was summed before changes, for some row of this warp.
  __device__ bool shrank() const {
    return __any_sync(0xffffffffu, shrink[0] != 1.f || shrink[1] != 1.f);
  }

  // Scores of a block become weights, in place. `scale` is of scores in units of log2.
  __device__ void weigh(float (&scores)[BLOCK_N / 2], const Tile& tile, int block, float scale) {
    if constexpr (SOFTCAP > 0) {
#pragma unroll
      for (float& one : scores) one = score(one, scale / kLog2E);
      scale = 1.f;
    }
    const int begin = block * BLOCK_N;
    if (begin + BLOCK_N - 1 > tile.position ||
        (WINDOW > 0 && begin < first_seen(tile.last_position()))) {
      mask(scores, tile, begin);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = -infinity();
#pragma unroll
      for (int at = 2 * i; at < BLOCK_N / 2; at += 4) {
        most = fmaxf(most, fmaxf(scores[at], scores[at + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = fmaxf(largest[i], most * scale);
      // A row whose window begins in a later block has seen nothing yet.
      const float reference = WINDOW > 0 && most == -infinity() ? 0.f : most;
      shrink[i] = exp2_approx(largest[i] - reference);
      largest[i] = most;
      float sum = 0.f;
#pragma unroll
      for (int at = 2 * i; at < BLOCK_N / 2; at += 4) {
        scores[at] = exp2_approx(fmaf(scores[at], scale, -reference));
        scores[at + 1] = exp2_approx(fmaf(scores[at + 1], scale, -reference));
        sum += scores[at] + scores[at + 1];
      }
      total[i] = fmaf(total[i], shrink[i], sum);
    }
  }

  __device__ static void mask(float (&scores)[BLOCK_N / 2], const Tile& tile, int begin) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = tile.position + number(i) / kGroup, origin = begin + threadIdx.x % 4 * 2;
      const int first = first_seen(position) - origin, last = position - origin;
#pragma unroll
      for (int at = 2 * i; at < BLOCK_N / 2; at += 4) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int key = at / 4 * 8 + odd;  // from this lane's first
          if (key > last || (WINDOW > 0 && key < first)) scores[at + odd] = -infinity();
        }
      }
    }
  }
};

// Issues scores [64, BLOCK_N] = Q . K^T.
template <class Operand>
__device__ inline void multiply_keys(float (&scores)[BLOCK_N / 2], unsigned queries, unsigned keys) {
  begin_products();
  const unsigned long long left = operand_in_panels(queries, 0), right = operand_in_panels(keys, 0);
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 32;
    multiply_shared<Operand, BLOCK_N>(scores, further(left, panel * kRows * 128 + in_panel),
                                      further(right, panel * BLOCK_N * 128 + in_panel), step > 0);
  }
  commit_products();
}

// Issues sums [64, kColumn...] += weights [64, 16] . V [16, kColumn...] in the widest products.
template <class Operand, int kColumn>
__device__ inline void multiply_columns(float (&sums)[VALUE_DIM / 2], const unsigned (&weights)[4],
                                        unsigned long long values) {
  if constexpr (kColumn < VALUE_DIM) {
    constexpr int kRest = VALUE_DIM - kColumn;
    constexpr int kColumns = kRest >= 128 ? 128 : kRest >= 64 ? 64 : kRest >= 32 ? 32 : 16;
    multiply_registers<Operand, kColumns>(
        reinterpret_cast<float(&)[kColumns / 2]>(sums[kColumn / 2]), weights,
        further(values, kColumn / 64 * (BLOCK_N * 128) + kColumn % 64 * 2));
    multiply_columns<Operand, kColumn + kColumns>(sums, weights, values);
  }
}

template <class Operand>
__device__ inline void multiply_values(float (&sums)[VALUE_DIM / 2],
                                       const unsigned (&weights)[BLOCK_N / 16][4], unsigned values) {
  begin_products();
  const unsigned long long right = operand_in_panels(values, BLOCK_N * 128);
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
    multiply_columns<Operand, 0>(sums, weights[step], further(right, step * 16 * 128));
  }
  commit_products();
}

// The weights of a block, as the second product's left operand.
template <class Operand>
__device__ inline void pack(const float (&scores)[BLOCK_N / 2], unsigned (&weights)[BLOCK_N / 16][4]) {
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      weights[step][part] =
          weight_operand<Operand>(scores[8 * step + 2 * part], scores[8 * step + 2 * part + 1]);
    }
  }
}

// This warp is through with a part: one of its barrier's eight arrivals.
__device__ inline void release(unsigned long long& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared_address(&empty));
}

// Writes sums / total; neighbouring lanes exchange halves so that each has four columns in a row.
template <class Out>
__device__ inline void store(const Rows& rows, const float (&sums)[VALUE_DIM / 2], const Tile& tile,
                             Out* out, const float* v_scale, const float* pre_scale,
                             const float* out_scale) {
  const int t = threadIdx.x % 4;
  const bool odd = t % 2;
  const Quantizer<Out> quantizer(pre_scale, out_scale);
  const float scale = value_or_one(v_scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = rows.total[i];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float by = scale / total;
    const int row = Rows::number(i), token = row / kGroup;
    const int head = tile.kv_head * kGroup + row % kGroup;
    Out* const to = out + static_cast<long long>(tile.first_row + token) * OUT_STRIDE;
#pragma unroll
    for (int column = 0; column < VALUE_DIM; column += 16) {
      const float* const pair = sums + column / 2 + 2 * i;
      const float mine[2] = {(odd ? pair[4] : pair[0]) * by, (odd ? pair[5] : pair[1]) * by};
      float theirs[2] = {(odd ? pair[0] : pair[4]) * by, (odd ? pair[1] : pair[5]) * by};
#pragma unroll
      for (float& one : theirs) one = __shfl_xor_sync(0xffffffffu, one, 1);
      const float four[4] = {odd ? theirs[0] : mine[0], odd ? theirs[1] : mine[1],
                             odd ? mine[0] : theirs[0], odd ? mine[1] : theirs[1]};
      if (token < tile.num_tokens) {
        quantizer.store(to, head * VALUE_DIM + column + (odd ? 6 + 2 * t : 2 * t), four);
      }
    }
  }
}

// Multiplies 64 rows of tile after tile. `shared` has the operands in panels, `queries`, `keys` and `values`, the
// latter by STAGES, and with them `barriers` and `tile`.
template <class Operand, class Shared, class Out>
__device__ inline void consume(Shared& shared, Out* out, const float* k_scale, const float* v_scale,
                               const float* pre_scale, const float* out_scale, const float* sinks) {
  Barriers& barriers = shared.barriers;
  // Of a value from one lane the compiler knows that all have the same.
  const int group = __shfl_sync(0xffffffffu, (threadIdx.x - kProducers) / 128, 0);
  const unsigned queries = shared_address(shared.queries) + group * 64 * 128;
  const float scale = static_cast<float>(SCALE) * kLog2E * value_or_one(k_scale);
  float scores[BLOCK_N / 2] = {};
  Turn turn;
  for (int round = 0;; ++round) {
    wait_at(shared_address(&barriers.query_full), round & 1);
    const Tile tile = shared.tile;
    if (tile.num_tokens == 0) return;
    Rows rows(tile, sinks);
    float sums[VALUE_DIM / 2] = {};
    unsigned weights[BLOCK_N / 16][4];

    const auto await_keys = [&] {
      wait_at(shared_address(&barriers.key_full[turn.stage()]), turn.parity());
    };
    const auto keys = [&] {
      multiply_keys<Operand>(scores, queries, shared_address(shared.keys[turn.stage()]));
    };
    const auto values = [&](Turn of) {
      wait_at(shared_address(&barriers.value_full[of.stage()]), of.parity());
      multiply_values<Operand>(sums, weights, shared_address(shared.values[of.stage()]));
    };

    int block = tile.first_block();
    await_keys();
    keys();
    wait_for_products<0>();
    settle(scores);
    release(barriers.key_empty[turn.stage()]);
    rows.weigh(scores, tile, block, scale);
    pack<Operand>(scores, weights);
    for (++block; block < tile.end_block(); ++block) {
      const Turn previous = turn;
      ++turn.number;
      await_keys();
      keys();
      values(previous);
      wait_for_products<1>();
      settle(scores);
      release(barriers.key_empty[turn.stage()]);
      rows.weigh(scores, tile, block, scale);
      finish_before_waiting(rows.total[0] + rows.total[1]);
      wait_for_products<0>();
      settle(sums);
      release(barriers.value_empty[previous.stage()]);
      if (rows.shrank()) {
#pragma unroll
        for (int at = 0; at < VALUE_DIM / 2; ++at) sums[at] *= rows.shrink[at % 4 / 2];
      }
      pack<Operand>(scores, weights);
    }
    release(barriers.query_empty);
    values(turn);
    wait_for_products<0>();
    settle(sums);
    release(barriers.value_empty[turn.stage()]);
    ++turn.number;
    store(rows, sums, tile, out, v_scale, pre_scale, out_scale);
  }
}

}  // namespace trtc
