// Steps of a loop that go through stages of shared memory, one after the other, for ever.
#pragma once

namespace trtc {

// Which stage a step goes through, and the parity of its turn there: what its barrier is waited for by
// (wait_at of gpu/hopper.cuh).
template <int kStages>
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ inline void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace trtc
