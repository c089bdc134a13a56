"""The interface of calibration algorithms: their input, and what they write."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trtc.protos.manifest import LayerError
from trtc.protos.progress import Progress
from trtc.quant.calibration_text import TokenSet
from trtc.quant.journal import Journals
from trtc.quant.layer_source import LayerSource


@dataclass(frozen=True)
class CalibrationJob:
    """A model and the text to calibrate it on."""

    source: LayerSource
    """A Transformers causal language model in bf16, with `SeparateExperts`; it may be changed."""
    model_dir: Path
    """The checkpoint that it was read from."""
    output_dir: Path
    """Exists."""
    tokens: TokenSet
    heldout: TokenSet
    """To measure the layers on."""
    phase: str
    """What progress is reported as."""
    progress: Progress
    journals: Journals | None = None
    """Where GPTQ and nvidia-modelopt keep the layers that are done; None: nowhere."""

    @property
    def model(self) -> Any:
        """The source's."""
        return self.source.model


class Calibrator(Protocol):
    """An algorithm with its settings, for one scheme. It holds the weights of a decoder layer at a
    time."""

    def work_bytes(self, model_dir: Path) -> int:
        """Memory that it takes beside the weights, where that is known; 0: little, or unknown."""
        ...

    @property
    def max_tokens(self) -> int:
        """Calibration tokens that it takes, at most."""
        ...

    def run(self, job: CalibrationJob) -> tuple[LayerError, ...]:
        """Write the quantised weights and the model's config to `output_dir`.

        Returns:
            Errors of the quantised linears on held-out text, in the order of the model.

        Raises:
            CalibrationError: activations that nothing can be calibrated on.
        """
        ...
