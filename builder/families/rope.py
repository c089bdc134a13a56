"""Rotary frequencies: config.json's spellings and scalings -> RopeSpec.

Two spellings are read: the flat one (`rope_theta`, `rope_scaling`, `partial_rotary_factor`) and
the newer `rope_parameters`. Scalings: default, linear (arXiv:2306.15595), llama3 (Llama 3.1),
yarn (arXiv:2309.00071), longrope (arXiv:2402.13753), proportional (Gemma 4), ntk_alpha (Hunyuan)
and dynamic (InternLM3), which changes nothing up to max_position_embeddings, the most that an
engine is built for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.builder.families.config import Config, shown
from trtc.builder.spec import QueryScale, RopeSpec
from trtc.protos.errors import CheckpointError, UnsupportedError

Frequencies = NDArray[np.float64]


def rope_spec(
    config: Config,
    head_dim: int,
    max_seq_len: int,
    *,
    default_theta: float = 10000.0,
    renamed: Mapping[str, str] | None = None,
) -> RopeSpec:
    """The rotary embedding that a config asks for.

    Args:
        head_dim: D.
        max_seq_len: of the engine. Up to longrope's original length it needs the short factors
            only; beyond, both sets.
        default_theta: the family's base when the config has none.
        renamed: older names of rope types in this family.

    Raises:
        UnsupportedError: a rope type that trtc does not have.
        CheckpointError: a parameter of the rope type is missing or wrong.
    """
    parameters = _parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = kind if isinstance(kind, str) else shown(kind)
    kind = (renamed or {}).get(kind, kind)
    if kind not in _SCALINGS:
        raise UnsupportedError(
            f"rope type {shown(kind)} is not supported",
            field="config.json: rope_parameters",
            remedy=f"trtc knows {', '.join(sorted(_SCALINGS))}",
        )
    theta = Config(parameters).number("rope_theta", config.number("rope_theta", default_theta))
    partial = Config(parameters).number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 1.0)
    )
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"gives {rotary_dim} rotary dimensions of {head_dim}, which are not a pair of halves",
            field="config.json: partial_rotary_factor",
        )
    plain = 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    scaling = _Scaling(parameters, config, theta, rotary_dim, partial, max_seq_len)
    with np.errstate(all="ignore"):
        inv_freq, attention_factor = _SCALINGS[kind](plain, scaling)
        _check_finite(inv_freq.astype(np.float32), np.asarray(attention_factor))
        spec = RopeSpec(rotary_dim, _rounded(inv_freq), attention_factor)
        if kind != "longrope" or max_seq_len <= scaling.original:
            return spec
        short = plain / scaling.factors("short_factor")
        _check_finite(short.astype(np.float32))
    return replace(spec, short_inv_freq=_rounded(short), short_length=scaling.original)


def rope_by_layer_type(
    config: Config, layer_type: str, head_dim: int, max_seq_len: int, *, default_theta: float
) -> RopeSpec:
    """The rotary embedding of one type of layer (Gemma 3).

    `rope_parameters` holds an object for each type. In the flat spelling `rope_theta` and
    `rope_scaling` are those of full attention, `rope_local_base_freq` is the base of windows.
    """
    fields = dict(config.fields)
    nested = fields.get("rope_parameters")
    if isinstance(nested, dict) and any(isinstance(one, dict) for one in nested.values()):
        fields |= {"rope_parameters": nested.get(layer_type) or {}, "rope_scaling": None}
    elif layer_type == "sliding_attention":
        theta = fields.get("rope_local_base_freq")
        fields |= {"rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    return rope_spec(Config(fields), head_dim, max_seq_len, default_theta=default_theta)


def rope_parameters(config: Config) -> Mapping[str, Any]:
    """`rope_parameters`, or the older `rope_scaling`; nothing where neither is given.

    Raises:
        CheckpointError: it is no object.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(
            f"is {shown(given)}, not an object", field="config.json: rope_parameters"
        )
    return given


def query_scale(config: Config) -> QueryScale | None:
    """How queries grow with their position; None: there is no `llama_4_scaling_beta`.

    Raises:
        CheckpointError: the rope parameters are none, or one of theirs is wrong.
    """
    parameters = Config(rope_parameters(config))
    beta = parameters.optional_number("llama_4_scaling_beta")
    if beta is None:
        return None
    return QueryScale(beta, parameters.integer("original_max_position_embeddings"))


def _rounded(inv_freq: Frequencies) -> tuple[float, ...]:
    return tuple(float(frequency) for frequency in inv_freq.astype(np.float32))


def _check_finite(*rotations: Frequencies) -> None:
    """Bounds of single numbers do not keep their quotients from being none.

    Raises:
        CheckpointError: a frequency is infinite or not a number.
    """
    if not all(np.isfinite(rotation).all() for rotation in rotations):
        raise CheckpointError(
            "gives frequencies that are not finite numbers", field="config.json: rope_parameters"
        )


def _parameters(config: Config) -> dict[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"is {shown(value)}, not an object", field=f"config.json: {key}")
        if any(isinstance(inner, dict) for inner in value.values()):
            raise UnsupportedError(
                "rotary parameters that differ by layer type are not supported",
                field=f"config.json: {key}",
            )
        return value
    return {}


class _Scaling:
    """What the scalings read: their parameters by name, and the facts around them."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        config: Config,
        theta: float,
        rotary_dim: int,
        partial: float,
        max_seq_len: int,
    ) -> None:
        self.parameters = Config(parameters)
        self.theta = theta
        self.rotary_dim = rotary_dim
        self.partial = partial
        self.max_seq_len = max_seq_len
        self.max_positions = config.integer("max_position_embeddings")
        # Phi-3 keeps the pretrained length outside of the rope parameters, where it decides.
        self.original = config.integer(
            "original_max_position_embeddings",
            self.parameters.integer("original_max_position_embeddings", self.max_positions),
        )

    def factors(self, key: str) -> Frequencies:
        values = self.parameters.sequence(key) or ()
        if len(values) != self.rotary_dim // 2:
            raise CheckpointError(
                f"has {len(values)} factors for {self.rotary_dim // 2} rotary pairs",
                field=f"config.json: rope_parameters.{key}",
            )
        return np.asarray([Config({key: value}).number(key) for value in values], np.float64)


def _default(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    return plain, 1.0


def _ntk_alpha(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    """The base grows, so that the slowest pair turns about `alpha` times more slowly (Hunyuan)."""
    dim = scaling.rotary_dim
    if dim <= 2:
        raise CheckpointError(
            f"needs more than {dim} rotary dimensions", field="config.json: rope_parameters.alpha"
        )
    base = scaling.theta * scaling.parameters.number("alpha") ** (dim / (dim - 2))
    return 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim), 1.0


def _linear(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    return plain / scaling.parameters.number("factor"), 1.0


def _llama3(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    factor = scaling.parameters.number("factor")
    low = scaling.parameters.number("low_freq_factor")
    high = scaling.parameters.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"{high} is not above low_freq_factor {low}",
            field="config.json: rope_parameters.high_freq_factor",
        )
    turns = scaling.original * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain, 1.0


def _yarn(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    """Dimensions that turn often are kept, those that turn rarely slowed, with a ramp between."""
    parameters = scaling.parameters
    factor = parameters.number("factor", scaling.max_positions / scaling.original)
    low = _yarn_dimension(parameters.number("beta_fast", 32.0), scaling)
    high = _yarn_dimension(parameters.number("beta_slow", 1.0), scaling)
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, scaling.rotary_dim - 1)
    width = high - low if high != low else 0.001
    slowed = np.clip((np.arange(scaling.rotary_dim // 2) - low) / width, 0.0, 1.0)
    inv_freq = plain / factor * slowed + plain * (1 - slowed)
    return inv_freq, _yarn_attention_factor(parameters, factor)


def _yarn_dimension(turns: float, scaling: _Scaling) -> float:
    """The (fractional) dimension that makes `turns` rotations over the original length."""
    ratio = math.log(scaling.original / (turns * 2 * math.pi))
    return scaling.rotary_dim * ratio / (2 * math.log(scaling.theta))


def _yarn_attention_factor(parameters: Config, factor: float) -> float:
    given = parameters.optional_number("attention_factor")
    if given is not None:
        return given
    mscale = parameters.optional_number("mscale")
    mscale_all_dim = parameters.optional_number("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    """One factor a pair: the long set if sequences may have more than the original length."""
    parameters = scaling.parameters
    is_long = scaling.max_seq_len > scaling.original
    inv_freq = plain / scaling.factors("long_factor" if is_long else "short_factor")
    given = parameters.optional_number("attention_factor")
    factor = parameters.number("factor", scaling.max_positions / scaling.original)
    if given is not None:
        return inv_freq, given
    if factor <= 1:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(max(scaling.original, 2)))


def _proportional(plain: Frequencies, scaling: _Scaling) -> tuple[Frequencies, float]:
    """Of the pairs (i, i + head_dim / 2) the first ones turn, with the frequencies that they have
    where all do; the others have frequency 0."""
    turning = int(scaling.partial * scaling.rotary_dim // 2)
    inv_freq = plain / scaling.parameters.number("factor", 1.0)
    return np.where(np.arange(len(plain)) < turning, inv_freq, 0.0), 1.0


_SCALINGS: Mapping[str, Callable[[Frequencies, _Scaling], tuple[Frequencies, float]]] = {
    "default": _default,
    "dynamic": _default,
    "ntk_alpha": _ntk_alpha,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
