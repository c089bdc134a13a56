"""Description of one engine of a server, for clients."""

import msgspec

from trtc.protos.sampling import SamplingOptions


class ModelInfo(msgspec.Struct, frozen=True):
    name: str
    family: str
    scheme: str
    kv_dtype: str
    target: str
    vocab_size: int
    max_seq_len: int
    """Prompt and completion tokens of one sequence."""
    max_batch_size: int
    """Sequences in one step."""
    max_num_tokens: int
    """Tokens in one step."""
    has_tokenizer: bool
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    page_size: int
    """Tokens in one page of the KV pool."""
    num_pages: int
    engine_digest: str
    """Digest of the engine's manifest."""
    trtc_version: str
    """Version of the server."""
    sampling_defaults: SamplingOptions = msgspec.field(default_factory=SamplingOptions)
    """Defaults of requests; parameters that are absent here have the runtime's defaults."""
    default_max_tokens: int | None = None
    """Default of `max_tokens`; None: as many as fit."""
    grammars: tuple[str, ...] = ()
    """Names of the grammars that the engine was built with."""
