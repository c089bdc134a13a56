"""Regular expressions of a quantisation config, matched with modules' names in bounded time."""

import time
from collections.abc import Mapping

import regex

from trtc.quant.formats.stored import unsupported

_MAX_REGEXES = 1000
MAX_CHARACTERS = 512
_MAX_SECONDS = 5.0
"""Of CPU time for all regular expressions: whoever wrote them chose the names too, and may have
made them backtrack for years."""


class ModuleRegexes:
    """Regular expressions in an order.

    Args:
        field: of the config, for errors.
        patterns: by how the config spells each, prefix included.
        whole: whether a pattern must match all of a name; else a beginning of it.

    Raises:
        UnsupportedError: very many or long patterns, or one that is no regular expression.
    """

    def __init__(self, field: str, patterns: Mapping[str, str], *, whole: bool) -> None:
        self._field = field
        self._whole = whole
        self._seconds_left = _MAX_SECONDS
        if len(patterns) > _MAX_REGEXES:
            known = f"at most {_MAX_REGEXES} regular expressions"
            raise unsupported(field, f"a list with {len(patterns)}", known)
        self._compiled = {spelled: self._compile(spelled, one) for spelled, one in patterns.items()}

    def first(self, name: str) -> str | None:
        """How the config spells the first pattern that matches; None: none does.

        Raises:
            UnsupportedError: the regular expressions take too long.
        """
        return next((spelled for spelled in self._compiled if self._matches(spelled, name)), None)

    def _matches(self, spelled: str, name: str) -> bool:
        pattern = self._compiled[spelled]
        match = pattern.fullmatch if self._whole else pattern.match
        began = time.process_time()
        try:
            found = match(name, timeout=max(self._seconds_left, 0.001)) is not None
        except TimeoutError as error:
            known = f"regular expressions that take at most {_MAX_SECONDS:.0f} s in all"
            raise unsupported(self._field, spelled, known) from error
        self._seconds_left -= time.process_time() - began
        return found

    def _compile(self, spelled: str, pattern: str) -> "regex.Pattern[str]":
        if len(spelled) > MAX_CHARACTERS:
            raise unsupported(self._field, spelled, f"names of at most {MAX_CHARACTERS} letters")
        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise unsupported(self._field, spelled, "valid regular expressions") from error
