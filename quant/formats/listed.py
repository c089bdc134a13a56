"""Lists of modules in quantisation configs: those that are left out, and those of a group.

Only whole names and regular expressions ("re:...") count: exporters write wildcards and parts of
names that match more than they left out, and the stored tensors leave no doubt.
"""

import time
from collections.abc import Mapping
from typing import Any

import regex

from trtc.protos.errors import CheckpointError
from trtc.quant.formats.stored import unsupported

_REGEX = "re:"
_MAX_NAMES = 500_000
_MAX_REGEXES = 1000
_MAX_CHARACTERS = 512
_MAX_SECONDS = 5.0
"""Of CPU time for all regular expressions: whoever wrote them chose the names too, and may have
made them backtrack for years."""


class ListedModules:
    """What one of some fields lists."""

    def __init__(self, config: Mapping[str, Any], *fields: str) -> None:
        """
        Args:
            fields: spellings of the list; the first that is not empty counts.

        Raises:
            UnsupportedError: it is not a list of names and regular expressions, or a very long one.
        """
        self._field = next((field for field in fields if config.get(field)), fields[0])
        listed = config.get(self._field) or []
        if not isinstance(listed, list) or len(listed) > _MAX_NAMES:
            raise unsupported(self._field, listed, f"a list of at most {_MAX_NAMES} names")
        for name in listed:
            if not isinstance(name, str) or len(name) > _MAX_CHARACTERS:
                raise unsupported(self._field, name, f"names of at most {_MAX_CHARACTERS} letters")
        self._names = {name for name in listed if not name.startswith(_REGEX)}
        self._regexes = self._compiled([name for name in listed if name.startswith(_REGEX)])
        self._seconds_left = _MAX_SECONDS

    def check(self, prefix: str) -> None:
        """See that a quantised module is not on the list.

        Raises:
            CheckpointError: it is.
            UnsupportedError: the regular expressions take too long.
        """
        if self.names(prefix):
            raise CheckpointError(
                "is quantised in the weights, but the quantization config excludes it",
                field=prefix,
                remedy="Config and weights are not of one export: download or export both again",
            )

    def names(self, prefix: str) -> bool:
        """Whether a module is on the list.

        Raises:
            UnsupportedError: the regular expressions take too long.
        """
        return self._lists(prefix) or self._matches(prefix)

    def _lists(self, prefix: str) -> bool:
        """Whether it, or the end of it from some point on, is a name on the list."""
        parts = prefix.split(".")
        return any(".".join(parts[begin:]) in self._names for begin in range(len(parts)))

    def _matches(self, prefix: str) -> bool:
        return any(self._matches_one(pattern, prefix) for pattern in self._regexes)

    def _matches_one(self, pattern: "regex.Pattern[str]", prefix: str) -> bool:
        began = time.process_time()
        try:
            found = pattern.fullmatch(prefix, timeout=max(self._seconds_left, 0.001)) is not None
        except TimeoutError as error:
            known = f"regular expressions that take at most {_MAX_SECONDS:.0f} s in all"
            raise unsupported(self._field, f"{_REGEX}{pattern.pattern}", known) from error
        self._seconds_left -= time.process_time() - began
        return found

    def _compiled(self, patterns: list[str]) -> "list[regex.Pattern[str]]":
        if len(patterns) > _MAX_REGEXES:
            known = f"at most {_MAX_REGEXES} regular expressions"
            raise unsupported(self._field, f"a list with {len(patterns)}", known)
        return [self._compile(pattern) for pattern in patterns]

    def _compile(self, pattern: str) -> "regex.Pattern[str]":
        try:
            return regex.compile(pattern.removeprefix(_REGEX))
        except (regex.error, RecursionError, OverflowError) as error:
            raise unsupported(self._field, pattern, "valid regular expressions") from error
