"""The parameters of sampling: one table, and what is declared by its names."""

import math

import msgspec
import pytest

from trtc.protos.sampling import (
    FLOAT32_MAX,
    SAMPLING_PARAMETERS,
    Range,
    SamplingDefaults,
    SamplingOptions,
    SamplingParams,
)
from trtc.protos.trtc.v1 import inference_pb2 as pb


def test_requests_defaults_and_messages_have_the_parameters_of_the_table() -> None:
    names = list(SamplingParams.__struct_fields__)
    assert names == [*(one.name for one in SAMPLING_PARAMETERS), "logit_bias", "seed"]
    assert list(SamplingOptions.__annotations__) == names
    assert {one.name for one in pb.SamplingParams.DESCRIPTOR.fields} == set(names)
    of_model = [one.name for one in SAMPLING_PARAMETERS if one.model_may_say]
    assert list(SamplingDefaults.__struct_fields__) == [*of_model, "max_tokens"]


def test_a_parameter_that_nobody_gives_has_a_value_in_its_range_and_of_its_type() -> None:
    params = SamplingParams()
    for one in SAMPLING_PARAMETERS:
        value = getattr(params, one.name)
        assert value == one.default
        assert value in one.values
        assert type(value) is one.kind


@pytest.mark.parametrize(
    ("values", "inside", "outside"),
    [
        (Range(0.0, 1.0), (0.0, 0.5, 1.0), (-0.1, 1.1, math.nan, math.inf)),
        (Range(0.0, 1.0, above_least=True), (1e-9, 1.0), (0.0, -1.0, math.nan)),
        (Range(0.0, math.inf), (0.0, FLOAT32_MAX), (-1e-9, 1e39, math.inf, math.nan)),
        (Range(0, 2**31 - 1), (0, 2**31 - 1), (-1, 2**31)),
    ],
)
def test_a_range_ends_where_it_says(
    values: Range, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert all(value in values for value in inside)
    assert not any(value in values for value in outside)


def test_a_range_says_itself_as_a_remedy() -> None:
    assert str(Range(0.0, math.inf, above_least=True)) == "above 0.0 and finite"
    assert str(Range(-2.0, 2.0)) == "at least -2.0 and at most 2.0"


@pytest.mark.parametrize(
    "json", ['{"top_p": 0}', '{"min_p": 2}', '{"temperature": 1e39}', '{"max_tokens": 0}']
)
def test_a_default_out_of_range_is_refused_by_name(json: str) -> None:
    name = json.split('"')[1]
    with pytest.raises(msgspec.ValidationError, match=rf"^{name} is "):
        msgspec.json.decode(json, type=SamplingDefaults)
