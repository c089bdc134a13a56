"""bf16 linears on CPUs that have no bf16 arithmetic: computed in f32, rounded to bf16 once."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def wide_linears() -> Iterator[None]:
    """Context manager under which bf16 linears on such a CPU take a seventh of the time.
    Both ways accumulate in f32; a result differs by a rounding of bf16 at most, and rarely.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    with _WideLinears():
        yield


class _WideLinears(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: tuple[type, ...],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        if function is functional.linear and _is_narrow(arguments[0]):
            wide = (None if one is None else one.float() for one in arguments)
            others = {name: None if one is None else one.float() for name, one in keywords.items()}
            return function(*wide, **others).to(arguments[0].dtype)
        return function(*arguments, **keywords)


def _is_narrow(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"
