// A barrier in shared memory, in the 8 bytes that the hardware's take.
#pragma once

#include "device.hpp"

namespace trtc {

struct Barrier {
  std::uint16_t count, missing, phase;
  std::int16_t expected;  // bytes to be copied, in units of 16; those that came first are negative
};

inline Barrier& barrier_at(unsigned address) {
  return *reinterpret_cast<Barrier*>(shared_bytes + address);
}

void end_phase_if_due(Barrier& one);
void arrive_at(Barrier& one);

}  // namespace trtc
