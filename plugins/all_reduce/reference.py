"""Sum over ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(x: Sequence[Array], *, ranks: int) -> tuple[Array]:
    """Return the sum of every rank's x, added in fp32 in their order and rounded once."""
    assert len(x) == ranks, f"{len(x)} of {ranks} ranks"
    total = x[0].astype(np.float32)
    for part in x[1:]:
        total = total + part.astype(np.float32)
    return (cast(total, str(x[0].dtype)),)
