"""What calibrations and searches begin with: a model, text, and where to keep what is done."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtc.quant.calibration_mixture import Mixture, tokenize_mixture
from trtc.quant.calibration_text import MIN_TOKENS, TOKENIZER_FILE, TokenSet
from trtc.quant.device import Placement
from trtc.quant.evaluation import SELF_SAMPLE_LENGTH
from trtc.quant.journal import Journals, key_of_inputs, open_journals
from trtc.quant.reference_model import load_model, sample_sequences

if TYPE_CHECKING:
    from trtc.quant.layer_source import LayerSource

_CALIBRATION_SEED = 1


def opened(model_dir: Path, dtype: str, texts: Mixture, heldout: TokenSet | None) -> "LayerSource":
    """The model, whole where it has to write text.

    Args:
        dtype: a torch name.
    """
    from trtc.quant.layer_source import LayeredModel, WholeModel

    writes = not (model_dir / TOKENIZER_FILE).is_file() and (texts.is_default or heldout is None)
    if writes:
        return WholeModel(load_model(model_dir, dtype))
    return LayeredModel(model_dir, dtype)


def journals_below(
    directory: Path | None,
    model: Any,
    model_dir: Path,
    texts: Sequence[TokenSet],
    placement: Placement,
) -> Journals | None:
    """Journals of a model's calibrations on some texts; None: nowhere, or the model has none.

    Args:
        texts: those to calibrate and to measure on.
    """
    from trtc.quant.layerwise import carries_more

    # A journal has hidden states alone of what a layer gives.
    if directory is None or carries_more(model):
        return None
    key = key_of_inputs(
        model_dir, [text.sequences for text in texts], placement.name, str(model.dtype)
    )
    return open_journals(directory, key)


def calibration_set(
    model: Any, model_dir: Path, texts: Mixture, window: int, max_tokens: int
) -> TokenSet:
    """Windows of the text, or what the model writes where it has no tokenizer."""
    if texts.is_default and not (model_dir / TOKENIZER_FILE).is_file():
        length = min(window, SELF_SAMPLE_LENGTH)
        count = 2 * MIN_TOKENS // length
        return sample_sequences(model, count=count, length=length, seed=_CALIBRATION_SEED)
    vocab_size = model.config.get_text_config().vocab_size
    return tokenize_mixture(texts, model_dir, vocab_size, window=window, max_tokens=max_tokens)
