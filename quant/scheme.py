"""Schemes: what `--dtype` names, as a literal table of frozen records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

from trtc.plugins.iq4 import GROUPS
from trtc.protos.errors import UnsupportedError

WeightFormat = Literal["f32", "bf16", "f8e4m3", "f4e2m1", "i8", "i6", "i4", "i4_f8", "iq4", "mxfp4"]
"""i4_f8: 4-bit weights that are dequantised to E4M3 before they are multiplied (W4A8).
i6: integers of 6 bits (plugins/six_bits.py).
iq4: 4-bit codes of unevenly spaced numbers, with scales of 8 bits (plugins/iq4.py).
mxfp4: E2M1 weights whose scales are powers of two (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True)
class Gptq:
    """Calibration by GPTQ, or by GPTAQ, for weights of 4 and 6 bits in groups (quant/gptq.py)."""

    asymmetric: bool
    """GPTAQ: aims at the outputs of the unquantised model."""
    damping: float = 0.05
    """Added to the diagonal of the inputs' Gram matrix, as a share of its mean."""
    correction: float = 0.5
    """Share of GPTAQ's shift that counts; the rest would fit the calibration text."""
    sweeps: int = 3
    """Of coordinate descent on the rounded weights (quant/descent.py); 0: none."""
    descent_damping: float = 0.015
    """As `damping`, while descending. Descent would trade the accuracy of quiet channels for more
    of it; without any, they would make good for what correlates with loud ones at all costs."""
    shrinkage: float = 0.2
    """Share of its own power that is added to each channel's while descending: as much less do
    channels count as correlated."""


@dataclass(frozen=True)
class Modelopt:
    """Calibration by nvidia-modelopt."""

    config: str
    """Name of its config, which says the algorithm too."""
    rounding: Gptq | None = None
    """Of weights to E4M3, with modelopt's scales (quant/modelopt_rounding.py); None: to nearest."""


@dataclass(frozen=True)
class Nearest:
    """Rounding to nearest, for 8-bit weights with a scale an output channel. Text is only measured
    on."""


Calibration = Modelopt | Gptq | Nearest
"""How scales and rounded weights are found: a record for each kind of algorithm, with its settings.
quant/calibrate.py has the function of each."""


@dataclass(frozen=True)
class Scheme:
    """A format, which is how linears are stored and multiplied, and how it is calibrated.

    Any calibration may go with a format that it can fill. The lm_head and routers stay in `dtype`.
    """

    name: str
    dtype: Literal["f32", "bf16"]
    """Of activations between operators, of norms' inputs, embeddings and lm_head."""
    weight: WeightFormat
    activation: Literal["f32", "bf16", "f8e4m3", "f4e2m1", "i8"]
    """What a quantised linear multiplies with, as the graph's Q/DQ nodes say."""
    group_size: int | None = None
    """Input channels that share a weight scale; None: one scale an output channel or a tensor."""
    pre_quant_scale: bool = False
    """Whether linears may have a scale an input channel (AWQ, SmoothQuant)."""
    dynamic: bool = False
    """Whether a row of an activation gets its scale as it comes, or one for each group, of weights
    in groups; else calibration gives one for all rows."""
    hadamard: int = 0
    """Input channels that a Hadamard matrix rotates together, in weights before they are rounded
    and in activations before they get their scale; a power of two. 0: none."""
    calibration: Calibration | None = None
    """None: nothing to calibrate, or nothing that trtc can make."""


MIXED = "mixed"
"""The name of schemes whose linears differ in format, as a recipe says (quant/recipe.py)."""

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp32", "f32", "f32", "f32"),
        Scheme("bf16", "bf16", "bf16", "bf16"),
        Scheme(
            "fp8",
            "bf16",
            "f8e4m3",
            "f8e4m3",
            calibration=Modelopt("FP8_DEFAULT_CFG", rounding=Gptq(asymmetric=False)),
        ),
        Scheme(
            "int8_sq",
            "bf16",
            "i8",
            "i8",
            pre_quant_scale=True,
            calibration=Modelopt("INT8_SMOOTHQUANT_CFG"),
        ),
        Scheme(
            "int4_awq",
            "bf16",
            "i4",
            "bf16",
            128,
            pre_quant_scale=True,
            calibration=Modelopt("INT4_AWQ_CFG"),
        ),
        Scheme(
            "w4a8_awq",
            "bf16",
            "i4_f8",
            "f8e4m3",
            128,
            pre_quant_scale=True,
            calibration=Modelopt("W4A8_AWQ_BETA_CFG"),
        ),
        Scheme("nvfp4", "bf16", "f4e2m1", "f4e2m1", 16, calibration=Modelopt("NVFP4_DEFAULT_CFG")),
        Scheme("int4", "bf16", "i4", "bf16", 128, calibration=Gptq(asymmetric=True)),
        Scheme("int4_g64", "bf16", "i4", "bf16", 64, calibration=Gptq(asymmetric=True)),
        Scheme("int4_g32", "bf16", "i4", "bf16", 32, calibration=Gptq(asymmetric=True)),
        Scheme("int4_gptq", "bf16", "i4", "bf16", 128, calibration=Gptq(asymmetric=False)),
        Scheme("iq4", "bf16", "iq4", "bf16", GROUPS[0], calibration=Gptq(asymmetric=True)),
        Scheme("iq4_g16", "bf16", "iq4", "bf16", GROUPS[1], calibration=Gptq(asymmetric=True)),
        Scheme("int6_g128", "bf16", "i6", "bf16", 128, calibration=Gptq(asymmetric=True)),
        Scheme("fp8_dynamic", "bf16", "f8e4m3", "f8e4m3", dynamic=True, calibration=Nearest()),
        Scheme("int8_dynamic", "bf16", "i8", "i8", dynamic=True, calibration=Nearest()),
        Scheme(
            "int8_hadamard",
            "bf16",
            "i8",
            "i8",
            dynamic=True,
            hadamard=64,
            calibration=Nearest(),
        ),
        # In blocks of 128 by 128, as DeepSeek releases; activations in groups of 128.
        Scheme("fp8_blocks", "bf16", "f8e4m3", "f8e4m3", 128, dynamic=True),
        # Weights only. Of checkpoints that round activations anew for every token, too, where a
        # target cannot: multiplying with the bf16 activation itself is exact where they round.
        Scheme("fp8_weights", "bf16", "f8e4m3", "bf16"),
        Scheme("int8_weights", "bf16", "i8", "bf16"),
        Scheme("nvfp4_weights", "bf16", "f4e2m1", "bf16", 16),
        Scheme("mxfp4_weights", "bf16", "mxfp4", "bf16", 32),
        # Of routed experts only; all else is bf16.
        Scheme("mxfp4", "bf16", "mxfp4", "bf16", 32),
    )
}

BUILDABLE = (
    "fp32",
    "bf16",
    "fp8",
    "fp8_dynamic",
    "int8_sq",
    "int8_dynamic",
    "int8_hadamard",
    "int4",
    "int4_g64",
    "int4_g32",
    "int4_gptq",
    "iq4",
    "iq4_g16",
    "int6_g128",
    "int4_awq",
    "w4a8_awq",
    "nvfp4",
)
"""Schemes that trtc can make itself; the others are read from checkpoints."""


@dataclass(frozen=True)
class TensorSource:
    """A canonical tensor as a pure function of checkpoint tensors (None: as stored)."""

    names: tuple[str, ...]
    function: Callable[..., NDArray[Any]] | None = None


@dataclass(frozen=True)
class QuantizedLinear:
    """How one linear of a checkpoint is quantised, in trtc's canonical form. Nothing is loaded.

    N out_features, K in_features, G = K / group_size or 1. Functions of tensors of all experts are
    given the rows of one linear. `tensors` has, as numpy arrays:
        weight           [N, K] f8e4m3, f4e2m1, i8, i4 or u4 (ml_dtypes, unpacked); of iq4 u4,
                         of i6 i8
        weight_scale     [N, G] or [1, 1] (one scale a tensor) f32: value = scale * (weight - zero);
                         for f4e2m1 [N, G] f8e4m3: value = scale_2 * scale * weight;
                         for iq4 value = scale * VALUES[weight];
                         for mxfp4 [N, G] u8: value = 2^(scale - 127) * weight
        weight_zero      [N, G] u4, when has_zero_point
        weight_scale_2   () f32, for i4_f8: the E4M3 weight's scale (value = scale_2 * e4m3), and
                         for f4e2m1
        input_scale      () f32, when the activation is quantised statically; for f4e2m1 the scale
                         of the E4M3 scales that each block of an activation gets as it comes
        pre_quant_scale  [K] f32, multiplies the input (AWQ, SmoothQuant)
        column_order     [K] i32, of groups that are scattered (act-order): the input channel that
                         each column of `weight` multiplies
    """

    weight: WeightFormat
    tensors: Mapping[str, TensorSource]
    group_size: int | None = None
    has_zero_point: bool = False
    shape: tuple[int, ...] | None = None
    """(N, K) as the stored tensors have it, or (E, N, K) of all experts, to hold against
    config.json; None: not known."""
    dynamic: bool = False
    """Whether each row of the activation, or each group of it where the weight has groups, is
    quantised to the weight's type by its largest magnitude."""
    hadamard: int = 0
    """Where it is not 0, a Hadamard matrix of +-1 multiplies so many channels of the activation
    together before it is quantised (plugins/hadamard.py). `weight` was multiplied by the same
    matrix, and `weight_scale` is over this number, as their product would be too large by it."""

    @property
    def is_scattered(self) -> bool:
        """Whether groups may be scattered over the input channels."""
        return "column_order" in self.tensors


@dataclass(frozen=True)
class CheckpointQuantization:
    """What a quantised checkpoint says of itself."""

    source: str
    """modelopt, awq, gptq, fp8, compressed-tensors or mxfp4."""
    scheme: Scheme
    linears: Mapping[str, QuantizedLinear]
    """Checkpoint prefix (`model.layers.0.self_attn.q_proj`) -> how; others are not quantised."""
    kv_scales: Mapping[str, TensorSource]
    """`k:<layer>` and `v:<layer>` -> () f32, when the KV cache is FP8 with scales."""
    kv_dtype: Literal["f8e4m3"] | None = None
    """What the checkpoint asks the KV cache to be; None: it says nothing."""
    notes: tuple[str, ...] = ()
    """What trtc does otherwise than the checkpoint says, for the report."""


DYNAMIC_NOTE = (
    "activations that the checkpoint would round anew for every token stay bf16, which is more "
    "exact"
)
_WEIGHT_BITS: Mapping[str, int] = {"i4": 4, "iq4": 4, "mxfp4": 4, "f4e2m1": 4, "i6": 6}
"""Of formats narrower than 8 bits that linears of one checkpoint may have beside others."""
_WEIGHTS_ONLY = {"f8e4m3": "fp8_weights", "i8": "int8_weights"}


def without_dynamic_activations(found: CheckpointQuantization) -> CheckpointQuantization:
    """For targets that quantise activations by scales of calibration alone: those that have none
    stay bf16, and a note says so.

    Raises:
        UnsupportedError: activations are rotated before.
    """
    if not any(linear.dynamic for linear in found.linears.values()):
        return found
    for name, linear in found.linears.items():
        if linear.hadamard:
            raise UnsupportedError(
                "is rotated by a Hadamard matrix, and the target does not rotate activations",
                field=name,
                remedy="Use --target cpu or cuda",
            )
    scheme = found.scheme
    if scheme.dynamic:
        scheme = replace(SCHEMES[_WEIGHTS_ONLY[scheme.weight]], group_size=scheme.group_size)
    linears = {name: replace(linear, dynamic=False) for name, linear in found.linears.items()}
    return replace(found, scheme=scheme, linears=linears, notes=(*found.notes, DYNAMIC_NOTE))


def mixed(schemes: Sequence[Scheme]) -> Scheme:
    """Of linears that have one of `schemes` each; their own, if it is one."""
    if len(schemes) == 1:
        return schemes[0]
    narrow = min(schemes, key=lambda one: _WEIGHT_BITS.get(one.weight, 8))
    group_size = max(one.group_size or 0 for one in schemes) or None
    return Scheme(MIXED, "bf16", narrow.weight, "bf16", group_size)


def scheme_named(name: str) -> Scheme:
    """The scheme called `name`.

    Raises:
        UnsupportedError: no such scheme.
    """
    if name not in SCHEMES:
        raise UnsupportedError(
            f"{name!r} is not a scheme",
            field="--dtype",
            remedy=f"Use one of {', '.join(BUILDABLE)}",
        )
    return SCHEMES[name]
