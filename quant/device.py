"""Chooses the device of a Transformers model: a GPU that holds all that is in memory of it at once,
else the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from trtc.protos.errors import EnvironmentFault
from trtc.quant.quiet import quiet_libraries

_WORK_SHARE = 0.25
"""Of the weights' bytes: what calibration holds besides them, such as a linear in f32."""
_WORK_BYTES = 2 << 30
"""Activations and the libraries' own workspace, beside either."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    device: str
    """torch's name, such as `cuda:0`."""
    name: str
    """The maker's, such as `NVIDIA H200`."""
    free_bytes: int


class Movable(Protocol):
    """Weights that go to the best device: of a model, or of a part of it at a time."""

    @property
    def num_bytes(self) -> int:
        """Of the weights that are in memory at once."""
        ...

    @property
    def bytes_at_work(self) -> int:
        """Of those that are while calibration holds most beside them."""
        ...

    def to(self, device: str) -> None:
        """Move what is in memory to a device, and what is read from now on; `meta` frees it."""
        ...


@dataclass(frozen=True)
class Placement:
    """The device of a model, and why it is not a GPU if there is one."""

    device: str
    """torch's name."""
    name: str
    """`CPU`, or the GPU's."""
    note: str = ""
    """Why the GPU that is there is not used; "": it is, or there is none."""

    def __str__(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


def peak_bytes(weights: Movable, work_bytes: int, other_bytes: int = 0) -> int:
    """Of weights and of what is held beside them.

    Args:
        work_bytes, other_bytes: as of `on_best_device`.
    """
    if not work_bytes:
        return weights.num_bytes + int(weights.num_bytes * _WORK_SHARE)
    return max(weights.num_bytes + other_bytes, weights.bytes_at_work + work_bytes)


def choose_device(
    weights: Movable, gpus: Sequence[Gpu], work_bytes: int = 0, other_bytes: int = 0
) -> Placement:
    """The GPU with the most free memory if a model fits there, else the CPU.

    Args:
        work_bytes, other_bytes: as of `on_best_device`.
    """
    needed = peak_bytes(weights, work_bytes, other_bytes) + _WORK_BYTES
    largest = max(gpus, key=lambda gpu: gpu.free_bytes, default=None)
    if largest is None:
        return Placement("cpu", "CPU")
    if largest.free_bytes < needed:
        free, wanted = largest.free_bytes / 1e9, needed / 1e9
        note = f"{largest.name} has {free:.1f} GB free, and {wanted:.1f} GB are needed"
        return Placement("cpu", "CPU", note)
    return Placement(largest.device, largest.name)


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch can compute on; CUDA_VISIBLE_DEVICES hides some."""
    import torch

    with quiet_libraries():
        if not torch.cuda.is_available():
            return ()
        found = []
        for index in range(torch.cuda.device_count()):
            free, _ = torch.cuda.mem_get_info(index)
            found.append(Gpu(f"cuda:{index}", torch.cuda.get_device_name(index), free))
        return tuple(found)


@contextmanager
def on_best_device(
    weights: Movable, work_bytes: int = 0, other_bytes: int = 0
) -> Iterator[Placement]:
    """Context manager that moves a model to the best device. At its end a GPU's memory is freed,
    and the model on it can no longer be used.

    Args:
        work_bytes: what is held beside the weights at work, where that is known; 0: a share of
            them.
        other_bytes: what is held beside the weights at other times.

    Raises:
        EnvironmentFault: the GPU ran out of memory after all.
    """
    import torch

    placement = choose_device(weights, visible_gpus(), work_bytes, other_bytes)
    if placement.device == "cpu":
        yield placement
        return
    # Matrices of very different sizes come and go, which leaves gaps in PyTorch's usual segments.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        weights.to(placement.device)
        yield placement
    except torch.OutOfMemoryError as error:
        raise EnvironmentFault(
            "ran out of memory",
            field=placement.name,
            remedy="Free some, or hide the GPU with CUDA_VISIBLE_DEVICES= to use the CPU",
        ) from error
    finally:
        weights.to("meta")
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned memory (quant/pinned.py)


def device_of(model: Any) -> Any:
    """The torch device of a Transformers model's embeddings, and of what it computes."""
    return model.get_input_embeddings().weight.device
