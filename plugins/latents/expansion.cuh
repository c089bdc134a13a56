// Which sequences of a step are expanded, as plugins/latents/expansion.py.
//
// Macros: LEAST_NEW ROOM MOST_CONTEXT ALIGNMENT.
#pragma once

namespace trtc {

// Tokens that a sequence asks for of the buffer; 0: it is not expanded.
__device__ inline int asked(int num_new, int context) {
  if (num_new < LEAST_NEW || (MOST_CONTEXT > 0 && context > MOST_CONTEXT)) return 0;
  const int tokens = (context + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  // More than ROOM would be as good, and might overflow a sum.
  return tokens < ROOM + ALIGNMENT ? tokens : ROOM + ALIGNMENT;
}

// Whether the sequence is expanded that has so many tokens asked for before it.
__device__ inline bool is_expanded(int before, int asked) {
  return asked > 0 && before + asked <= ROOM;
}

}  // namespace trtc
