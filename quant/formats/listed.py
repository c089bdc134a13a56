"""Lists of modules in quantisation configs: those that are left out, and those of a group.

Only whole names and regular expressions ("re:...") count: exporters write wildcards and parts of
names that match more than they left out, and the stored tensors leave no doubt.
"""

from collections.abc import Mapping
from typing import Any

from trtc.quant.formats.module_regexes import MAX_CHARACTERS, ModuleRegexes
from trtc.quant.formats.stored import excluded, unsupported

_REGEX = "re:"
_MAX_NAMES = 500_000
ALL_LINEARS = "Linear"
"""The target of compressed-tensors that names a class."""


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
            if not isinstance(name, str) or len(name) > MAX_CHARACTERS:
                raise unsupported(self._field, name, f"names of at most {MAX_CHARACTERS} letters")
        self._names = {name for name in listed if not name.startswith(_REGEX)}
        patterns = {n: n.removeprefix(_REGEX) for n in listed if n.startswith(_REGEX)}
        self._regexes = ModuleRegexes(self._field, patterns, whole=True)

    def check(self, prefix: str) -> None:
        """See that a quantised module is not on the list.

        Raises:
            CheckpointError: it is.
            UnsupportedError: the regular expressions take too long.
        """
        if self.names(prefix):
            raise excluded(prefix)

    def names(self, prefix: str) -> bool:
        """Whether a module is on the list.

        Raises:
            UnsupportedError: the regular expressions take too long.
        """
        return self._lists(prefix) or self._regexes.first(prefix) is not None

    def _lists(self, prefix: str) -> bool:
        """Whether it, or the end of it from some point on, is a name on the list."""
        parts = prefix.split(".")
        return any(".".join(parts[begin:]) in self._names for begin in range(len(parts)))
