"""Grammars over pyllama's tokens, and an engine in this process that draws them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.support.lazy import LazyEcho
from tests.support.servers import EOS, TOKENIZER, EchoEngine, manifest
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.session import Session
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.grammar.mask_source import GrammarMasks
from trtc.runtime.requests.grammar import Grammar
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
    options: EchoOptions = OPTIONS, drafts: DraftConfig | None = None, *, ahead: bool = False
) -> Iterator[LocalEngine]:
    """Whose model has no idea of what it writes.

    Args:
        ahead: over an executor that runs ahead.
    """
    engine = EchoEngine(options, tokenizer=TOKENIZER)
    executor = LazyEcho(options) if ahead else EchoExecutor(options)
    session = Session(TOKENIZER, manifest(engine, executor), executor, Tokenizer.load(TOKENIZER))
    with LocalEngine(session, drafts=drafts) as local:
        yield local


class TextReader:
    """Reads texts as a model writes them: by tokens that the masks allow, then the end."""

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        self._grammars = grammars
        self._of_text: dict[bytes, list[int]] = {}
        for token in range(VOCAB_SIZE):
            if not tokenizer.is_special(token):
                self._of_text.setdefault(tokenizer.token_utf8(token), []).append(token)

    def reads(self, grammar: Grammar, text: str) -> bool:
        """Whether some tokens of the text are allowed, and then the end."""
        return self._reads(self._grammars.masks(grammar, 1), [], text.encode())

    def _reads(self, masks: GrammarMasks, output: list[int], rest: bytes) -> bool:
        allowed = tokens_of(masks.allowed(output))
        if not rest:
            return EOS in allowed
        for size in range(len(rest), 0, -1):
            for token in self._of_text.get(rest[:size], ()):
                if token in allowed and self._reads(masks, [*output, token], rest[size:]):
                    return True
        return False


def tokens_of(mask: bytes) -> set[int]:
    """Those that it allows."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
