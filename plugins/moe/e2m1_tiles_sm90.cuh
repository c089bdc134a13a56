// What e2m1_operand_sm90.cu writes and e2m1_tiles_sm90.cu reads.
#pragma once

namespace trtc {

// Rows that the operand of so many pairs has: products are by 16 of them at least.
__device__ inline int operand_rows(int pairs) { return (pairs + 15) / 16 * 16; }

}  // namespace trtc
