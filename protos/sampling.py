"""The parameters of sampling: name, type, default, range and meaning, each declared once.

    SamplingOptions     the parameters of a request
    SamplingDefaults    the model's defaults
    SamplingParams      the parameters in use, with the runtime's defaults

Validation, command line, keyword arguments, Triton's inputs, the step's sampling columns and the
sampler's tensors are derived from SAMPLING_PARAMETERS; trtc.v1's messages have its names.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, TypedDict

import msgspec

FLOAT32_MAX = 3.4028234663852886e38


class Range(msgspec.Struct, frozen=True):
    """Values of a number; a `most` of infinity allows all that are finite in float32."""

    least: float
    most: float
    above_least: bool = False
    """Whether `least` itself is excluded."""

    def __contains__(self, value: float) -> bool:
        above = value > self.least if self.above_least else value >= self.least
        return above and value <= min(self.most, FLOAT32_MAX)  # false for NaN

    def __str__(self) -> str:
        lower = f"above {self.least}" if self.above_least else f"at least {self.least}"
        return f"{lower} and {'finite' if self.most == math.inf else f'at most {self.most}'}"


class _Facts(NamedTuple):
    """The annotation of a number."""

    values: Range
    meaning: str
    model_may_say: bool = False


_PENALTY = Range(-2.0, 2.0)


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling parameters. The defaults sample from the model's own distribution."""

    temperature: Annotated[
        float, _Facts(Range(0.0, math.inf), "0 takes the likeliest token", model_may_say=True)
    ] = 1.0
    top_k: Annotated[
        int,
        _Facts(
            Range(0, 2**31 - 1),
            "draw from the k likeliest tokens, 0: from all",
            model_may_say=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        _Facts(
            Range(0.0, 1.0, above_least=True),
            "draw from the fewest tokens that have this probability together",
            model_may_say=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        _Facts(
            Range(0.0, 1.0),
            "leave out tokens less likely than this share of the likeliest",
            model_may_say=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        _Facts(
            Range(0.0, math.inf, above_least=True),
            "divides positive logits of tokens seen before, and multiplies negative ones",
            model_may_say=True,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, _Facts(_PENALTY, "taken from the logits of tokens drawn before")
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _Facts(_PENALTY, "taken from the logits of tokens for each time that they were drawn"),
    ] = 0.0
    logit_bias: Mapping[int, float] = {}
    seed: int | None = None
    """None: drawn when the request is admitted."""

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams that the caller gave. The others are the model's defaults, or else
    the runtime's."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int


class SamplingParameter(NamedTuple):
    """One number of SamplingParams."""

    name: str
    kind: type[int] | type[float]
    default: float
    values: Range
    meaning: str
    model_may_say: bool
    """Whether it may be in generation_config.json, under the same name."""

    @property
    def dtype(self) -> Literal["i32", "f32"]:
        """Element type of its column, with one value per row."""
        return "i32" if self.kind is int else "f32"

    @property
    def default_said(self) -> str:
        return (
            f"the model's own, or {self.default:g}" if self.model_may_say else f"{self.default:g}"
        )


def _parameters() -> Iterator[SamplingParameter]:
    defaults = SamplingParams()
    for name, annotation in SamplingParams.__annotations__.items():
        for facts in getattr(annotation, "__metadata__", ()):
            default = getattr(defaults, name)
            yield SamplingParameter(name, type(default), default, *facts)


SAMPLING_PARAMETERS: tuple[SamplingParameter, ...] = tuple(_parameters())


class SamplingDefaults(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Defaults of the model's authors, for parameters that a request leaves out; None: no
    default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range, which makes a decoder's ValidationError."""
        for name, value in self.sampling().items():
            _check(name, value, _OF_MODEL[name])
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, _MAX_TOKENS)

    def sampling(self) -> dict[str, float]:
        """The fields of SamplingParams that are set, by name."""
        given = {name: getattr(self, name) for name in _OF_MODEL}
        return {name: value for name, value in given.items() if value is not None}


_OF_MODEL = {one.name: one.values for one in SAMPLING_PARAMETERS if one.model_may_say}
_MAX_TOKENS = Range(1, 2**31 - 1)

NO_DEFAULTS = SamplingDefaults()


def _check(name: str, value: float, values: Range) -> None:
    if value not in values:
        raise ValueError(f"{name} is {value}, not {values}")
