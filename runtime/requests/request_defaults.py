"""Sampling defaults of requests: those of the model's generation_config.json, or the runtime's."""

from typing import Literal

from trtc.protos.manifest import ModelFacts
from trtc.protos.sampling import NO_DEFAULTS, SamplingDefaults

GenerationConfig = Literal["model", "trtc"]


def request_defaults(model: ModelFacts, source: GenerationConfig) -> SamplingDefaults:
    """Defaults of the sampling parameters that requests to a model leave out."""
    return model.sampling_defaults if source == "model" else NO_DEFAULTS
