"""One engine of a server: opened and running."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from trtc.protos.errors import NoTokenizerError
from trtc.protos.manifest import Manifest
from trtc.protos.sampling import SamplingOptions
from trtc.runtime.engine.loop import EngineLoop
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.text.tokenizer import Tokenizer
from trtc.version import __version__

if TYPE_CHECKING:
    from trtc.runtime.executors.weights import KeptWeights
    from trtc.runtime.requests.model_info import ModelInfo


class EngineHandle(msgspec.Struct, frozen=True):
    """One engine, opened and running, as the service uses it."""

    name: str
    manifest: Manifest
    tokenizer: Tokenizer | None
    num_pages: int
    """Pages of its KV pool."""
    loop: EngineLoop
    grammars: Grammars
    close: Callable[[], None]
    """Frees the executor, once the loop has stopped."""
    version: str = "1"
    """Version of the model of this name."""
    keep_weights: "Callable[[], KeptWeights] | None" = None
    """Returns its weights for when it is opened again. Call it after the loop has stopped and
    before `close`. None: not supported."""
    raise_if_changed: Callable[[], None] = lambda: None
    """Raises EngineCorruptError if a file that the engine maps has been written to."""

    def tokenizer_for(self, field: str) -> Tokenizer:
        """The tokenizer that `field` of a request needs.

        Raises:
            NoTokenizerError: the engine has none.
        """
        if self.tokenizer is None:
            raise NoTokenizerError(
                f"engine {self.name} was built without a tokenizer",
                field=field,
                remedy="Send token_ids, or build the engine from a checkpoint with tokenizer.json",
            )
        return self.tokenizer

    def info(self) -> "ModelInfo":
        from trtc.runtime.requests.model_info import ModelInfo  # used by servers only

        manifest, defaults = self.manifest, self.loop.bounds.defaults
        return ModelInfo(
            name=self.name,
            family=manifest.model.family,
            scheme=manifest.scheme.name,
            kv_dtype=manifest.scheme.kv_dtype,
            target=manifest.target.name,
            vocab_size=manifest.model.vocab_size,
            max_seq_len=manifest.limits.max_seq_len,
            max_batch_size=manifest.limits.max_batch_size,
            max_num_tokens=manifest.limits.max_num_tokens,
            has_tokenizer=self.tokenizer is not None,
            has_chat_template=(self.tokenizer is not None and self.tokenizer.has_chat_template),
            eos_token_ids=manifest.model.eos_token_ids,
            page_size=manifest.kv.page_size,
            num_pages=self.num_pages,
            engine_digest=manifest.digest,
            trtc_version=__version__,
            sampling_defaults=cast(SamplingOptions, defaults.sampling()),
            default_max_tokens=defaults.max_tokens,
            grammars=self.grammars.names,
        )
