// The end of streamed.cu where the first half of the weight's rows is gate's and the second up's:
// out = quantize(activation(gate) * up), of half as many columns, or in bf16. What streamed.cu knows of
// it is what it knows of its own Columns and Output.
//
// Of four sums of a thread the first two are of gate, the others of up, in the same column of out. A
// group's results go through shared memory, where they become 16-byte vectors of rows.
//
// Macros, beside those of streamed.cu: GELU_TANH (else silu), HAS_OUT_SCALE, OUT_E4M3 (0 or 1; else bf16).
#pragma once

#include "gpu/activation.cuh"
#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"

namespace trtc {

using Unit = GatedUnit<GELU_TANH>;
#if OUT_E4M3
using Result = E4m3;
#else
using Result = Bf16;
#endif
constexpr int kOutColumns = N / 2;
constexpr int kGroupColumns = 32;  // of a tile of out, that a group of 128 threads has sums of
constexpr int kPieceBytes = 16;
constexpr int kPieces = kGroupColumns * sizeof(Result) / kPieceBytes;  // of a row
constexpr int kPieceColumns = kPieceBytes / sizeof(Result);
static_assert(N % 32 == 0 && OUT_STRIDE % kPieceColumns == 0);

// A group's results of kRows rows of x. With room between rows, lanes write to different banks.
template <int kRows>
struct Outbox {
  uint4 rows[kRows][kPieces + 1];
};

struct Columns {
  int first;  // of out, the only one
  Factors by;

  // Before the tile's products, so that its end waits for nothing. `row` is the first of the two of
  // the weight in the order of linear's tiles.
  __device__ inline Columns(int row, const float* weight_scale, const Unit& unit) : first(row / 2) {
    const int at = first < kOutColumns ? first : kOutColumns - 1;
    float gate = 1, up = 1;
    if (HAS_WEIGHT_SCALE) {
      gate = load_early(weight_scale + at);
      up = load_early(weight_scale + kOutColumns + at);
    }
    by = unit.factors(gate, up);
  }
};

template <int kRows>
struct GatedOutput {
  const float* weight_scale;
  Unit unit;
  const float* row_scales;  // in shared memory
  void* out;
  int rows;
  Outbox<kRows>* outboxes;  // by group

  __device__ inline Columns columns(int row) const { return Columns(row, weight_scale, unit); }

  // Nothing is added to the sums.
  template <int kMore>
  __device__ inline void load(float (&)[kMore], int, const Columns&) const {}

  // Of `i` as in `store`, j 0 or 1: the row of x that sums i + j and i + j + 2 are of.
  __device__ inline static int row_of(int i, int j) {
    return 2 * i + static_cast<int>(threadIdx.x) % 4 * 2 + j;
  }

  // Sums `first` ... of a group's threads: of rows 2 * first ... of x.
  template <int kCount, int kMore>
  __device__ inline void store(const float* sums, const float (&)[kMore], int first,
                               const Columns& columns) const {
    static_assert(2 * kCount == kRows);
    const int group = static_cast<int>(threadIdx.x) / 128;
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    const int in_group = thread / 32 * 8 + lane / 4;
    Outbox<kRows>& outbox = outboxes[group];
    sync_threads(1 + group, 128);  // what was here before is in `out`
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float by = HAS_ROW_SCALE ? row_scales[2 * first + row_of(i, j)] : 1.f;
        auto* const row = reinterpret_cast<Result*>(outbox.rows[row_of(i, j)]);
        row[in_group] = round_to<Result>(
            Unit::of(sums[i + j] * by, sums[i + j + 2] * by, columns.by.gate, columns.by.both));
      }
    }
    sync_threads(1 + group, 128);
    const int begin = columns.first - in_group;
#pragma unroll
    for (int at = thread; at < kRows * kPieces; at += 128) {
      const int stored = at / kPieces, piece = at % kPieces;
      const int row = 2 * first + stored, column = begin + piece * kPieceColumns;
      if (row >= rows || column >= kOutColumns) continue;
      auto* const to = static_cast<Result*>(out) + static_cast<long long>(row) * OUT_STRIDE + column;
      *reinterpret_cast<uint4*>(to) = outbox.rows[stored][piece];
    }
  }
};

}  // namespace trtc
