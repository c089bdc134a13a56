"""Whose defaults requests get: the model's, of its generation_config.json, or the runtime's."""

from typing import Literal

from trtc.protos.manifest import ModelFacts
from trtc.protos.sampling import NO_DEFAULTS, SamplingDefaults

GenerationConfig = Literal["model", "trtc"]


def request_defaults(model: ModelFacts, source: GenerationConfig) -> SamplingDefaults:
    """What requests to a model get where they do not say."""
    return model.sampling_defaults if source == "model" else NO_DEFAULTS
