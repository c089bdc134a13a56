"""What a calibration has to tell, which is read without PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtc.protos.manifest import LayerError


@dataclass(frozen=True)
class CalibrationFacts:
    """Inputs and results of a calibration, for the checkpoint's record."""

    source: str
    """Name of the text's file, `default`, or `model` when the model wrote it itself."""
    sha256: str
    tokens: int
    layers: tuple[LayerError, ...]
    """On held-out text, in the order of the model."""
    starved_experts: tuple[str, ...] = ()
    """Experts that calibration text hardly reached, calibrated on all tokens of their layer."""
    device: str = "CPU"
    """What computed: `CPU`, or the GPU's name. Their rounding differs."""
    kept: tuple[str, ...] = ()
    """Linears that were left unquantised because `keep` names them, or one that must be alike."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """The recipe's, by site; empty: there was none."""
