"""Products with Hadamard matrices of +-1, for references: kernels give the same bits.

Such a matrix, divided by the root of its size, is a rotation. It spreads channels that are much
larger than others over all of a block, so that rounding a row by its largest magnitude leaves codes
for the rest (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
"""

import numpy as np
from numpy.typing import NDArray


def hadamard_product(rows: NDArray[np.generic], block: int) -> NDArray[np.float32]:
    """[..., K] times Sylvester's matrix of size `block`, a power of two that divides K, for each
    block of channels; twice is `block` times `rows`. Of `block` 0 the rows as they are.

    A sum of four is (a + c) + (b + d), in f32: kernels add in the same order.
    """
    shape, half = rows.shape, block // 2
    product: NDArray[np.float32] = rows.astype(np.float32)
    while half:
        pairs = product.reshape(-1, 2, half)
        one, other = pairs[:, 0], pairs[:, 1]
        product = np.stack([one + other, one - other], axis=1).reshape(shape)
        half //= 2
    return product
