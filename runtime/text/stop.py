"""Finds stop strings in streamed text, also across tokens."""

from collections.abc import Sequence


class StopScanner:
    """Passes text up to the first stop string.

    The first is the one that ends first; of several that end at one character, the longest. The
    result does not depend on how the text is split. Text that may be the start of a stop string is
    held back: at most the length of the longest stop string minus one.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        """`stops`: none is empty. `include_stop`: whether the text includes the stop string."""
        self._include_stop = include_stop
        # Longest first: the first to match at a character is the one to report.
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str]:
        """The text to emit, and the stop string that was found, or "".

        Args:
            may_stop: whether a stop string that ends in this text counts.
        """
        if not self._matchers:
            return text, ""
        buffer = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            # Each matcher must see each character, so no short-circuit.
            found = [matcher.pattern for matcher in self._matchers if matcher.feed(character)]
            if found and may_stop:
                self._held = ""
                end = at if self._include_stop else at - len(found[0])
                return buffer[:end], found[0]
        certain = len(buffer) - max(matcher.pending for matcher in self._matchers)
        self._held = buffer[certain:]
        return buffer[:certain], ""

    def flush(self) -> str:
        """The text held back, after the end."""
        rest, self._held = self._held, ""
        return rest


class _Matcher:
    """Knuth, Morris, Pratt: the longest prefix of a pattern that the text so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        """Characters of the pattern that the text ends with."""
        self._borders = _borders(pattern)

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may yet begin the pattern."""
        return self._borders[-1] if self.matched == len(self.pattern) else self.matched

    def feed(self, character: str) -> bool:
        """Whether the pattern ends at this character."""
        matched = self.pending
        while matched and self.pattern[matched] != character:
            matched = self._borders[matched - 1]
        self.matched = matched + (self.pattern[matched] == character)
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != character:
            length = borders[length - 1]
        borders.append(length + (pattern[length] == character))
    return borders
