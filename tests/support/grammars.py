"""Grammars over pyllama's tokens, and an engine in this process that draws them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.support.servers import EOS, TOKENIZER, EchoEngine, manifest
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.session import Session
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.text.tokenizer import Tokenizer

VOCAB_SIZE = 4096
OPTIONS = EchoOptions(vocab_size=VOCAB_SIZE, num_pages=512, max_batch_size=8)


@contextmanager
def pyllama_grammars() -> Iterator[Grammars]:
    tokenizer = Tokenizer.load(TOKENIZER)
    grammars = Grammars(tokenizer, VOCAB_SIZE, (EOS,))
    try:
        yield grammars
    finally:
        grammars.close()
        tokenizer.close()


@contextmanager
def grammar_engine(
    options: EchoOptions = OPTIONS, drafts: DraftConfig | None = None
) -> Iterator[LocalEngine]:
    """Whose model has no idea of what it writes."""
    engine = EchoEngine(options, tokenizer=TOKENIZER)
    executor = EchoExecutor(options)
    session = Session(TOKENIZER, manifest(engine, executor), executor, Tokenizer.load(TOKENIZER))
    with LocalEngine(session, drafts=drafts) as local:
        yield local


def tokens_of(mask: bytes) -> set[int]:
    """Those that it allows."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
