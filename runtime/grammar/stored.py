"""An engine's own grammars, which requests use by name."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from trtc.protos.errors import InvalidRequestError, RequestError
from trtc.protos.grammars import StoredGrammar
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.text.tokenizer import Tokenizer

_ANY_END = (0,)
"""Whether a grammar compiles does not depend on the token that ends a sequence."""


def named_grammars(stored: Mapping[str, StoredGrammar]) -> dict[str, Grammar]:
    """The grammars of an engine's file."""
    return {name: Grammar(one.kind, one.text, f"grammar {name}") for name, one in stored.items()}


def try_grammars(directory: Path, vocab_size: int, stored: Mapping[str, StoredGrammar]) -> None:
    """Compile each grammar for the tokenizer of a checkpoint.

    Raises:
        RequestError: one cannot be compiled; `field` is its name.
        EnvironmentFault: llguidance is not installed.
    """
    with closing(Tokenizer.load(directory)) as tokenizer:
        grammars = Grammars(tokenizer, vocab_size, _ANY_END)
        with closing(grammars):
            for name, grammar in named_grammars(stored).items():
                try:
                    grammars.masks(grammar, 1)
                except InvalidRequestError as error:
                    raise RequestError(error.problem, field=name, remedy=error.remedy) from error
