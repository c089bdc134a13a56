// Attention of sequences with several new tokens, on the tensor cores of sm_90a.
//
// Tiles are those of attention/tiles_sm90.cuh. Of the producers, warps 0 and 1 have K copied, and warps 2 and 3 have Q
// and V copied.
//
// Macros: those of context.cuh and attention/tiles_sm90.cuh, and RAW_STAGES SHARED_BYTES MAX_SEQUENCES.
#include "attention/consumer_sm90.cuh"
#include "paged_attention/prefill_sm90_copies.cuh"

using namespace trtc;

// Grid: (programs, 1, 1), as many as fit on a chip. `counter` is 0.
extern "C" __global__ void __launch_bounds__(kProducers + kConsumers, 1)
attention_prefill(const int* query_start, const int* context_lens, const int* page_table,
                  K_SCALE_PARAMETER V_SCALE_PARAMETER PRE_SCALE_PARAMETER OUT_SCALE_PARAMETER
                  SINKS_PARAMETER const int* dims, Out* out, int* counter, const TensorMap* query_map,
                  const TensorMap* page_map, const TensorMap* row_map) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    make_barrier(shared_address(&shared.query_copied), 1);
    shared.barriers.make();
    for (auto& fulls : shared.raw_full) {
      for (auto& full : fulls) make_barrier(shared_address(&full), 1);
    }
    publish_to_products();  // and to TMA
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    give_registers<PRODUCER_REGISTERS>();
    produce(shared, {query_map, page_map, row_map}, query_start, context_lens, page_table, dims[1],
            counter);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume<Operand>(shared, out, k_scale, v_scale, pre_scale, out_scale, sinks);
  }
}
