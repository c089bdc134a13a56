"""Splits the text of an answer into text, thoughts and calls of tools, as it comes.

    text --begin of a thought--> thought --its end--> text
    text --begin of a call--> call --its end--> text

What comes out does not depend on how the text was cut: it is read by characters. Text that may yet
turn out to be part of a mark is held back, and so is a call until its name and the beginning of its
arguments are known: then it is one, and its arguments come in deltas. What is none is text. Nothing
is lost but marks, and whitespace beside them.
"""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Literal

from trtc.protos.answer_formats import AnswerFormat
from trtc.runtime.text.answer import AnswerPart, joined
from trtc.runtime.text.call_reader import (
    MAX_CALL_CHARACTERS,
    CallReader,
    Malformed,
    Reading,
    ToolTypes,
)

_ALPHABET = string.ascii_letters + string.digits


class AnswerParser:
    """Of one sequence."""

    def __init__(
        self, form: AnswerFormat, tools: Mapping[str, ToolTypes], *, in_thought: bool = False
    ) -> None:
        """
        Args:
            tools: those that the answer may call, by name; none: calls are text.
            in_thought: whether the prompt ends within a thought.
        """
        self._form = form
        self._tools = tools
        self._parts: list[AnswerPart] = []
        self._pending = ""
        """The beginning of a mark, perhaps."""
        self._spaces: list[str] = []
        """Whitespace that is text only if text follows."""
        self._after_mark = in_thought
        """Whether nothing but whitespace has come since the last mark."""
        self._has_text = False
        self._has_calls = False
        self._num_calls = 0
        self._call: CallReader | None = None
        self._reading: Reading | None = None
        """Of `_call`."""
        self._has_begun = False
        """Whether what is being read is a call."""
        self._raw: list[str] = []
        """Of what is being read, what is not in a part yet."""
        self.in_thought = in_thought

    def push(self, text: str) -> Sequence[AnswerPart]:
        """The parts that a text makes certain."""
        at = 0
        while at < len(text):
            if self._reading is None and not self._pending:
                at = self._plain(text, at)
                if at == len(text):
                    break
            size = 1 if self._reading is None or self._call is None else self._call.run(text, at)
            self._feed(text[at : at + size])
            at += size
        return self._take()

    def flush(self) -> Sequence[AnswerPart]:
        """The rest, now that no more text comes."""
        while self._reading is not None:
            self._feed("")
        self._emit(self._pending)
        self._pending = ""
        if self.in_thought or not self._after_mark:
            self._write("".join(self._spaces))
        self._spaces.clear()
        return self._take()

    def _take(self) -> Sequence[AnswerPart]:
        parts, self._parts = self._parts, []
        return joined(parts)

    # Outside of calls

    def _plain(self, text: str, at: int) -> int:
        """Emit what comes before the next character that may begin a mark; where that is."""
        markers = self._markers()
        if not markers:
            end = len(text)
        else:
            found = _firsts(markers).search(text, at)
            end = len(text) if found is None else found.start()
        if end > at:
            self._emit(text[at:end])
        return end

    def _feed(self, character: str) -> None:
        """Args: character: within a call perhaps a run of them."""
        if self._reading is not None:
            self._feed_call(character)
            return
        self._pending += character
        markers = self._markers()
        while self._pending and character:
            if self._pending in markers:
                mark, self._pending = self._pending, ""
                self._found(mark)
                return
            if any(mark.startswith(self._pending) for mark in markers):
                return
            self._emit(self._pending[0])
            self._pending = self._pending[1:]
            markers = self._markers()

    def _markers(self) -> tuple[str, ...]:
        """Those that count here."""
        form = self._form
        if self.in_thought:
            assert form.thought is not None
            return (form.thought.end,)
        markers = form.dropped
        is_first = not self._has_text and not self._has_calls
        if form.thought is not None and (is_first or form.thought.repeats):
            markers += form.thought.begins
        return markers + self._call_markers()

    def _call_markers(self) -> tuple[str, ...]:
        call = self._form.call
        if call is None or not self._tools:
            return ()
        begins = (self._has_text and call.begins_later) or call.begins
        separates = call.separator and self._has_calls and self._after_mark
        return begins + (call.separator,) * bool(separates)

    def _found(self, mark: str) -> None:
        form = self._form
        before = "" if self._after_mark else "".join(self._spaces)
        self._spaces.clear()
        self._after_mark = True
        if self.in_thought:
            self.in_thought = False
        elif form.thought is not None and mark in form.thought.begins:
            self.in_thought = True
        elif form.call is not None and mark in form.call.begins + form.call.begins_later:
            self._begin_call(mark, before)

    def _emit(self, text: str) -> None:
        """Text of the present kind. Whitespace beside marks waits for what follows."""
        if not text:
            return
        if not text.strip():
            self._spaces.append(text)
            return
        body = text.lstrip()
        lead = text[: len(text) - len(body)]
        rest = body.rstrip()
        before = "" if self._after_mark else "".join(self._spaces) + lead
        self._spaces = [body[len(rest) :]] if len(rest) < len(body) else []
        self._write(before + rest)

    def _write(self, text: str) -> None:
        if not text:
            return
        self._after_mark = False
        kind: Literal["text", "reasoning"] = "reasoning" if self.in_thought else "text"
        self._has_text = self._has_text or not self.in_thought
        self._parts.append(AnswerPart(kind, text))

    # Within a call

    def _begin_call(self, mark: str, before: str) -> None:
        """Args: before: whitespace, which is text if this is no call."""
        assert self._form.call is not None
        self._raw = [before + mark]
        self._call = CallReader(self._form.call, self._tools)
        self._reading = self._call.read()
        self._has_begun = False
        next(self._reading)
        if self._form.call.keeps_begin:
            for character in mark:
                self._send(character)

    def _feed_call(self, character: str) -> None:
        if character:
            self._raw.append(character)
        if len(self._raw) > MAX_CALL_CHARACTERS:
            self._not_a_call("")
        else:
            self._send(character)

    def _send(self, character: str) -> None:
        assert self._reading is not None
        try:
            self._reading.send(character)
        except StopIteration:
            self._hear()
            self._reading, self._raw = None, []
        except Malformed as error:
            self._hear()
            self._not_a_call(error.unread)
        else:
            self._hear()

    def _not_a_call(self, unread: str) -> None:
        """What is in no part yet is text, but for its last characters, which may begin a mark."""
        raw = "".join(self._raw)
        self._reading, self._raw = None, []
        if self._has_begun:
            self._emit(raw[: len(raw) - len(unread)])
        else:
            unread = unread if len(unread) < len(raw) else ""
            self._after_mark = False
            self._write(raw[: len(raw) - len(unread)])
        for character in unread:
            self._feed(character)

    def _hear(self) -> None:
        """The parts of what has become known of calls."""
        assert self._call is not None
        for event in self._call.take():
            self._raw = []
            self._has_begun = self._has_calls = self._after_mark = True
            if event.kind == "begins":
                part = AnswerPart("call", "", self._num_calls, self._new_id(), event.text)
                self._num_calls += 1
                self._parts.append(part)
            elif event.text:
                self._parts.append(AnswerPart("call", event.text, self._num_calls - 1))

    def _new_id(self) -> str:
        if self._form.short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _firsts(markers: Sequence[str]) -> re.Pattern[str]:
    # `re` keeps what it has compiled.
    return re.compile("[" + "".join(re.escape(mark[0]) for mark in markers) + "]")
