"""Quantised checkpoints: detects the format, and converts its metadata to the canonical form.

An unknown format or value is an error that names it: weights that are decoded by the wrong rule
would give nonsense without any error.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.formats.awq import read_awq
from trtc.quant.formats.compressed_tensors import read_compressed_tensors
from trtc.quant.formats.fp8 import read_fp8
from trtc.quant.formats.gptq import read_gptq
from trtc.quant.formats.modelopt import read_modelopt
from trtc.quant.formats.mxfp4 import read_mxfp4
from trtc.quant.formats.stored import CONFIG_FIELD, shown, unsupported
from trtc.quant.scheme import CheckpointQuantization

Reader = Callable[
    [Mapping[str, Any], Mapping[str, tuple[str, tuple[int, ...]]]], CheckpointQuantization
]
READERS: Mapping[str, Reader] = {
    "modelopt": read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "mxfp4": read_mxfp4,
}
"""By `quantization_config.quant_method` of config.json."""


def read_quantization(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
) -> CheckpointQuantization | None:
    """How a checkpoint is quantised, or None if it is not. No tensor is read.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, where there is one (nvidia-modelopt's).
        tensors: every stored tensor's (element type as safetensors spells it, shape) by name.

    Raises:
        UnsupportedError: a format, or a value in its config, that trtc does not know.
        CheckpointError: tensors that are missing or contradict the config.
    """
    declared = config.get("quantization_config")
    if hf_quant_config is not None:
        with _called("hf_quant_config.json: quantization"):
            return _checked(read_modelopt(_object(hf_quant_config.get("quantization")), tensors))
    if declared is not None:
        with _called("config.json: quantization_config"):
            return _checked(_read_declared(_object(declared), tensors))
    _check_unquantized(tensors)
    return None


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Errors of the config name its file."""
    try:
        yield
    except (CheckpointError, UnsupportedError) as error:
        if not error.field.startswith(CONFIG_FIELD):
            raise
        field = name + error.field.removeprefix(CONFIG_FIELD)
        raise type(error)(error.problem, field=field, remedy=error.remedy) from error


def _checked(found: CheckpointQuantization) -> CheckpointQuantization:
    for prefix in found.linears:
        if "layers." not in prefix:
            raise UnsupportedError(
                "is quantised; trtc computes it in bf16",
                field=prefix,
                remedy="Quantise again without it (lm_head and embeddings belong in the ignore "
                "list), or build from the unquantised checkpoint",
            )
    if not found.linears and found.kv_dtype is None:
        raise CheckpointError(
            f"says that the checkpoint is quantised ({found.source}), but no weight is",
            field=CONFIG_FIELD,
            remedy="Config and weights are not of one export: download or export both again",
        )
    return found


def _read_declared(
    declared: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    method = declared.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise unsupported("quant_method", method, ", ".join(READERS))
    return READERS[method](declared, tensors)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"is {shown(value)}, not an object", field=CONFIG_FIELD)
    return value


def _check_unquantized(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuse quantised tensors without a quantisation config: their format is unknown."""
    for name, (dtype, _) in tensors.items():
        if dtype not in ("F32", "BF16", "F16", "F64", "I64", "BOOL"):
            raise CheckpointError(
                f"holds {dtype}, but config.json has no quantization_config to say how to read it",
                field=name,
                remedy="Copy hf_quant_config.json or quantization_config from the original",
            )
