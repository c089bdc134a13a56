"""What a server says of one of its engines."""

from dataclasses import dataclass

from trtc.protos.trtc.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class ModelInfo:
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
    """Of the server."""


def info_from_wire(info: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=info.name,
        family=info.family,
        scheme=info.scheme,
        kv_dtype=info.kv_dtype,
        target=info.target,
        vocab_size=info.vocab_size,
        max_seq_len=info.max_seq_len,
        max_batch_size=info.max_batch_size,
        max_num_tokens=info.max_num_tokens,
        has_tokenizer=info.has_tokenizer,
        has_chat_template=info.has_chat_template,
        eos_token_ids=tuple(info.eos_token_ids),
        page_size=info.page_size,
        num_pages=info.num_pages,
        engine_digest=info.engine_digest,
        trtc_version=info.trtc_version,
    )
