"""What the unquantised checkpoint predicts, a decoder layer in memory at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtc.quant.calibration_text import Int32s
from trtc.quant.device import on_best_device
from trtc.quant.reference_model import reference_dtype

Float32s = NDArray[np.float32]


def reference_logits(model_dir: Path, sequences: Sequence[Int32s]) -> Iterator[Float32s]:
    """Logits [len, vocab] of every sequence, one at a time.

    All go through a layer before the next is read; hidden states of all are in memory.

    Raises:
        CheckpointError, UnsupportedError: as `load_model`.
    """
    import torch

    from trtc.quant.layer_source import LayeredModel
    from trtc.quant.layerwise import logits_after, open_stream, run_layers
    from trtc.quant.wide_linears import wide_linears

    source = LayeredModel(model_dir, reference_dtype(model_dir))
    with on_best_device(source):
        # Each alone: how many are computed at once changes the last bits.
        stream = open_stream(source.model, sequences, wide=False, batch=1)
        with wide_linears():
            run_layers(source, stream)
        for ids, batch in zip(sequences, stream, strict=True):
            with torch.inference_mode():
                logits = logits_after(source.model, ids, batch.hidden)
            yield logits.float().cpu().numpy()
