"""Mamba-2 layers, which several families have beside attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtc.builder.families import common
from trtc.builder.families.config import Config, shown
from trtc.builder.spec import LinearSpec, Mamba2Spec
from trtc.protos.errors import CheckpointError

MAMBA = "linear_attention"
_ALIASES: Mapping[str, str] = {"mamba": MAMBA, "attention": common.FULL}
"""Layer types as older configs name them."""


@dataclass(frozen=True)
class Sizes:
    """Of a family's layers, by whatever names its config.json has them."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    conv_bias: bool
    proj_bias: bool


def sizes(config: Config) -> Sizes:
    """Of a family whose fields begin with `mamba_` (Granite 4, Bamba).

    Raises:
        CheckpointError: heads that are not `mamba_expand` times as wide as the model, or that
            groups do not share equally.
    """
    config = config.with_defaults(
        mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2
    )
    heads, groups = config.integer("mamba_n_heads"), config.integer("mamba_n_groups")
    width = config.integer("mamba_expand") * config.integer("hidden_size")
    given = config.get("mamba_d_head")
    dim = width // heads if given in (None, "auto") else config.integer("mamba_d_head")
    if heads * dim != width:
        raise CheckpointError(
            f"makes {heads} heads of {dim}, and mamba_expand * hidden_size is {width}",
            field="config.json: mamba_n_heads",
        )
    check_groups(heads, groups, "mamba_n_groups")
    return Sizes(
        heads=heads,
        head_dim=dim,
        groups=groups,
        state_size=config.integer("mamba_d_state"),
        taps=config.integer("mamba_d_conv", least=2),
        conv_bias=config.flag("mamba_conv_bias", True),
        proj_bias=config.flag("mamba_proj_bias", False),
    )


def check_groups(heads: int, groups: int, field: str) -> None:
    """
    Raises:
        CheckpointError: groups do not share the heads equally.
    """
    if heads % groups:
        raise CheckpointError(
            f"{groups} does not divide the {heads} heads", field=f"config.json: {field}"
        )


def mamba2(
    config: Config, prefix: str, sizes: Sizes, norm: common.NormStyle = common.RMS_NORM
) -> Mamba2Spec:
    """The layer whose tensors are under `prefix`; in_proj has the rows of z, x, B, C and dt."""
    hidden, width = config.integer("hidden_size"), sizes.heads * sizes.head_dim
    channels = width + 2 * sizes.groups * sizes.state_size
    least, most = _step_limits(config)

    def rows(begin: int, number: int) -> LinearSpec:
        name, end = f"{prefix}.in_proj", begin + number
        return LinearSpec(name, hidden, number, sizes.proj_bias, rows=(begin, end))

    return Mamba2Spec(
        z=rows(0, width),
        xbc=rows(width, channels),
        dt=rows(width + channels, sizes.heads),
        out_proj=LinearSpec(f"{prefix}.out_proj", width, hidden, sizes.proj_bias),
        conv=f"{prefix}.conv1d",
        taps=sizes.taps,
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        norm=common.norm(config, f"{prefix}.norm", norm),
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_groups=sizes.groups,
        state_size=sizes.state_size,
        has_bias=sizes.conv_bias,
        dt_min=least,
        dt_max=None if math.isinf(most) else most,
    )


def layer_kinds(config: Config, key: str, kinds: tuple[str, ...]) -> tuple[str, ...] | None:
    """The layer types under `key` as Transformers names them today; None: the field is absent.

    Raises:
        UnsupportedError: one that is not among `kinds`.
    """
    given = config.sequence(key)
    if given is None:
        return None
    named = tuple(_ALIASES.get(kind, kind) if isinstance(kind, str) else kind for kind in given)
    common.check_types(named, key, kinds)
    return named


def _step_limits(config: Config) -> tuple[float, float]:
    """`time_step_limit`, from 0 to infinity where it is absent.

    Raises:
        CheckpointError: no two numbers, or not in order.
    """
    given = config.sequence("time_step_limit") or (0.0, math.inf)
    limits = tuple(map(_number, given))
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise CheckpointError(
            f"is {shown(list(given))}, not two numbers from 0 on in their order",
            field="config.json: time_step_limit",
        )
    return limits[0], limits[1]


def _number(value: Any) -> float:
    """Newer Transformers write infinity as {"__float__": "Infinity"}. NaN: no number."""
    if isinstance(value, dict) and value.get("__float__") == "Infinity":
        return math.inf
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (not isinstance(value, float) and abs(value) > 1 << 31):
        return math.nan
    return float(value)
