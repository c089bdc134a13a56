"""Sampling defaults of generation_config.json, in the manifest's form."""

from collections.abc import Mapping
from typing import Any

import msgspec

from trtc.protos.errors import CheckpointError
from trtc.protos.sampling import SAMPLING_PARAMETERS, SamplingDefaults

_NAMES = {
    **{one.name: one.name for one in SAMPLING_PARAMETERS if one.model_may_say},
    "max_new_tokens": "max_tokens",
}
"""Of the file -> of requests."""


def sampling_defaults(generation_config: Mapping[str, Any], file: str) -> SamplingDefaults:
    """The defaults of requests to a model.

    `do_sample: false` is a temperature of 0; where it is absent, requests sample. A `top_k` of -1
    is 0: no limit.

    Args:
        file: the name of generation_config.json, for errors.

    Raises:
        CheckpointError: a value is out of range.
    """
    given = {
        ours: generation_config[theirs]
        for theirs, ours in _NAMES.items()
        if generation_config.get(theirs) is not None
    }
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"a sampling default is out of range ({error})",
            field=file,
            remedy="Correct the value, or remove it",
        ) from error
