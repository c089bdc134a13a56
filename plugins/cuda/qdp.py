"""What the operators' ahead-of-time TensorRT plugins (`tensorrt.plugin`) have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtc.protos.bundle import KernelFacts
from trtc.protos.errors import InvariantError

TYPE_NAMES: Mapping[str, str] = {"f32": "FP32", "bf16": "BF16", "f16": "FP16", "f8e4m3": "FP8"}
"""trtc -> the names that AutoTuneCombination takes."""
_DTYPES: Mapping[str, str] = {"FLOAT": "f32", "BF16": "bf16", "HALF": "f16", "FP8": "f8e4m3"}
"""Names of trt.DataType -> trtc."""


@dataclass(frozen=True)
class Kernels:
    """A bundle's kernels, as its plugins ask for them."""

    facts: tuple[KernelFacts, ...]
    read: Callable[[str], bytes]
    """A file of the bundle by its name there."""

    def find(
        self, op: str, dtypes: Mapping[str, str], attributes: Mapping[str, int | float], tactic: int
    ) -> KernelFacts:
        """The kernel of a node.

        Args:
            attributes: as TensorRT hands them over, floats rounded to f32.

        Raises:
            InvariantError: the bundle has none.
        """
        for kernel in self.facts:
            if (
                kernel.op == op
                and kernel.tactic == tactic
                and kernel.dtypes == dict(dtypes)
                and all(_same(kernel.attributes[name], attributes[name]) for name in attributes)
            ):
                return kernel
        raise InvariantError(
            f"the bundle has no kernel for {dict(dtypes)} {dict(attributes)}, tactic {tactic}",
            field=op,
        )

    def tactics(self, op: str) -> list[int]:
        return sorted({kernel.tactic for kernel in self.facts if kernel.op == op})

    def types(self, op: str, parameter: str) -> str:
        """The one element type that a bundle's nodes have for a parameter, as TensorRT's name."""
        found = {kernel.dtypes[parameter] for kernel in self.facts if kernel.op == op}
        assert len(found) == 1, f"{op}.{parameter} has several types: {found}"
        return TYPE_NAMES[found.pop()]


def dtype_name(tensor: Any) -> str:
    """The element type of a TensorDesc as trtc calls it."""
    return _DTYPES[tensor.dtype.name]


def launch_params(trtp: Any, kernel: KernelFacts, grid: tuple[Any, Any]) -> Any:
    """KernelLaunchParams of a kernel over a grid of symbolic or known size."""
    params = trtp.KernelLaunchParams()
    params.grid_x, params.grid_y = grid
    params.block_x = kernel.num_threads
    params.shared_mem = kernel.shared_bytes
    return params


def _same(stored: int | float | str, given: int | float) -> bool:
    return not isinstance(stored, str) and bool(np.float32(stored) == np.float32(given))
