"""A structural tag as llguidance's Lark.

    text until a trigger    one lazy lexeme, TEXT "<tool>": it ends where the trigger first does
    text until its end      one such lexeme as well
    what is regular         one terminal, so that no part of it takes what belongs to the next

Between other parts a part that can go on goes on: a number takes all digits that come.
"""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import regex_to_lark

from trtc.runtime.grammar import structural_tag as tags
from trtc.runtime.grammar.structural_tag import Format

_TEXT = "TEXT"
_ANY_TEXT = "/(?s:.*)/"

Schema = Callable[[str], Mapping[str, Any]]
"""A schema's text to the schema that stands in a grammar."""
LarkText = Callable[[str], str]
"""A grammar in Lark's or GBNF's notation to llguidance's Lark."""


@dataclass(frozen=True)
class TokenIds:
    """What a grammar may know of a vocabulary."""

    of_names: Mapping[str, int]
    """Ids of added tokens, by their texts."""
    ends: tuple[int, ...]
    """End-of-sequence tokens, of which no part of an output is one."""


@dataclass(frozen=True)
class _Texts:
    """One of these ends what is before it."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class _Token:
    token: int


_End = _Texts | _Token | Literal["output", "nothing"]
"""What follows a format: texts, a token, the end of the output, or other formats."""


def tag_grammar(format: Format, token_ids: TokenIds, schema: Schema, lark: LarkText) -> str:
    """The grammar of a structural tag, in llguidance's own words.

    Raises:
        ValueError: it cannot be held.
    """
    writer = _Writer(token_ids, schema, lark)
    start = writer.until(format, "output")
    rules = [f"start: {start}", f"{_TEXT}: {_ANY_TEXT}", *writer.rules]
    written = "%llguidance {}\n" + "\n".join(rules)
    if not writer.grammars:
        return written
    whole = {"name": "structural_tag", "lark_grammar": written}
    return json.dumps({"grammars": [whole, *writer.grammars]})


class _Writer:
    """Writes formats as expressions of Lark, and the rules that those need."""

    def __init__(self, token_ids: TokenIds, schema: Schema, lark: LarkText) -> None:
        self._token_ids = token_ids
        self._schema = schema
        self._lark = lark
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []

    def until(self, format: Format, end: _End) -> str:
        """A format and what ends it."""
        regular = _regular(format)
        if regular is not None and isinstance(end, _Texts):
            return self._rule(f"{regular} {_literals(end.texts)}", "T")
        if regular is not None:
            return f"{self._rule(regular, 'T')} {_ending(end)}".rstrip()
        if type(format) in _CLOSED:
            return f"{_CLOSED[type(format)](self, format)} {_ending(end)}".rstrip()
        return _OPEN[type(format)](self, format, end)

    # Formats that end by themselves.

    def _json_schema(self, format: tags.JsonSchema) -> str:
        schema = self._schema(bytes(format.json_schema).decode())
        return "%json " + json.dumps(schema)

    def _grammar(self, format: tags.GrammarText) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": self._lark(format.grammar)})
        return f"@{name}"

    def _token(self, format: tags.Token) -> str:
        return f"<[{self._id(format.token)}]>"

    def _repeated(
        self, format: tags.Optional | tags.Plus | tags.Star | tags.Repeat, end: _End
    ) -> str:
        rule = self._rule(self.until(format.content, "nothing"), "r")
        return f"({rule}){_times(format)} {_ending(end)}".rstrip()

    def _separated(self, format: tags.TagsWithSeparator, end: _End) -> str:
        one = self._rule(" | ".join(self.until(tag, "nothing") for tag in format.tags), "r")
        more = "" if format.stop_after_first else f"({_literal(format.separator)} {one})*"
        least = "" if format.at_least_one else "?"
        return f"({one} {more}){least} {_ending(end)}".rstrip()

    # Formats that what follows has to end, or may have parts which it has to.

    def _any_text(self, format: tags.AnyText, end: _End) -> str:
        most = "" if format.max_chars is None else f"{{0,{format.max_chars}}}"
        text = f"/(?s:.{most})/" if most else _TEXT
        return self._text(self._without(text, format.excludes, end), end, format)

    def _exclude_token(self, format: tags.ExcludeToken, end: _End) -> str:
        return f"{self._other_tokens(format.exclude_tokens, end)} {_ending(end)}".rstrip()

    def _any_tokens(self, format: tags.AnyTokens, end: _End) -> str:
        if end == "nothing" or isinstance(end, _Texts):
            raise _endless(format, "the token that ends a tag")
        most = "*" if format.max_tokens is None else f"{{0,{format.max_tokens}}}"
        others = self._other_tokens(format.exclude_tokens, end)
        return f"{others}{most} {_ending(end)}".rstrip()

    def _sequence(self, format: tags.Sequence, end: _End) -> str:
        parts, left = [], list(format.elements)
        while left:
            one = left.pop(0)
            follows = left[0] if left else None
            if not left:
                parts.append(self.until(one, end))
            elif isinstance(follows, tags.ConstString) and follows.value and _is_open(one):
                left.pop(0)
                parts += [self.until(one, _Texts((follows.value,)))]
                parts += [] if left else [_ending(end)]
            else:
                parts.append(self.until(one, "nothing"))
        return " ".join(parts)

    def _or(self, format: tags.Or, end: _End) -> str:
        return self._rule(" | ".join(self.until(one, end) for one in format.elements), "r")

    def _tag(self, format: tags.Tag, end: _End) -> str:
        begin = format.begin
        opening = _literal(begin) if isinstance(begin, str) else self._token(begin)
        return f"{opening} {self._after_begin(format, end)}"

    def _after_begin(self, tag: tags.Tag, end: _End) -> str:
        """The content and the end of a tag, and what ends the tag."""
        own = self._end(tag.end)
        if own is None:
            return self.until(tag.content, end)
        return f"{self.until(tag.content, own)} {_ending(end)}".rstrip()

    def _triggered(self, format: tags.TriggeredTags, end: _End) -> str:
        groups = _by_trigger(format)
        bodies = {
            trigger: self._rule(" | ".join(self._after_trigger(trigger, one) for one in group), "r")
            for trigger, group in groups.items()
        }
        text = self._without(_TEXT, format.excludes, end)
        heads = [
            f"{self._rule(f'{text} {_literal(trigger)}', 'h', lazy=True)} {body}"
            for trigger, body in bodies.items()
        ]
        firsts = [f"{_literal(trigger)} {body}" for trigger, body in bodies.items()]
        return self._loop(format, heads, firsts, lambda: self._text(text, end, format), end)

    def _after_trigger(self, trigger: str, tag: tags.Tag) -> str:
        assert isinstance(tag.begin, str)
        rest = tag.begin[len(trigger) :]
        return (
            f"{_literal(rest)} {self._after_begin(tag, 'nothing')}"
            if rest
            else (self._after_begin(tag, "nothing"))
        )

    def _token_triggered(self, format: tags.TokenTriggeredTags, end: _End) -> str:
        triggers = {self._id(one) for one in format.trigger_tokens}
        bodies = []
        for tag in format.tags:
            if isinstance(tag.begin, str):
                raise ValueError("a tag of token_triggered_tags begins with a token")
            if self._id(tag.begin.token) not in triggers:
                raise ValueError(f"no trigger token is the begin of a tag ({tag.begin.token!r})")
            bodies.append(self._tag(tag, "nothing"))
        excluded = [*format.exclude_tokens, *triggers]
        return self._token_loop(format, excluded, bodies, end)

    def _dispatch(self, format: tags.Dispatch, end: _End) -> str:
        as_tags = tags.TriggeredTags(
            triggers=list(dict.fromkeys(text for text, _ in format.rules)),
            tags=[tags.Tag(begin=text, content=content, end="") for text, content in format.rules],
            stop_after_first=not format.loop,
            excludes=format.excludes,
        )
        return self._triggered(as_tags, end)

    def _token_dispatch(self, format: tags.TokenDispatch, end: _End) -> str:
        as_tags = tags.TokenTriggeredTags(
            trigger_tokens=[token for token, _ in format.rules],
            tags=[
                tags.Tag(begin=tags.Token(token=token), content=content, end="")
                for token, content in format.rules
            ],
            stop_after_first=not format.loop,
            exclude_tokens=format.exclude_tokens,
        )
        return self._token_triggered(as_tags, end)

    def _token_loop(
        self,
        format: tags.TokenTriggeredTags,
        excluded: Listed[int | str],
        bodies: list[str],
        end: _End,
    ) -> str:
        others = self._rule(f"{self._other_tokens(excluded, end)}*", "r")

        def tail() -> str:
            if end == "nothing" or isinstance(end, _Texts):
                raise _endless(format, "the token that ends a tag")
            return f"{others} {_ending(end)}".rstrip()

        return self._loop(format, [f"{others} {body}" for body in bodies], bodies, tail, end)

    def _loop(
        self,
        format: tags.TriggeredTags | tags.TokenTriggeredTags,
        heads: list[str],
        firsts: list[str],
        tail: Callable[[], str],
        end: _End,
    ) -> str:
        """Tags with text before each (`heads`); the first may have none (`firsts`)."""
        first = self._rule(" | ".join(firsts if format.at_least_one else heads), "r")
        if format.stop_after_first:
            ended = f"{first} {_ending(end)}".rstrip()
            return ended if format.at_least_one else self._rule(f"{ended} | {tail()}", "r")
        if not format.at_least_one:
            return f"({first})* {tail()}"
        more = self._rule(" | ".join(heads), "r")
        return f"{first} ({more})* {tail()}"

    # Parts of them.

    def _text(self, text: str, end: _End, format: Format) -> str:
        """Any text up to its end."""
        if end == "nothing":
            raise _endless(format, "the end of a tag, a const_string after it")
        if isinstance(end, _Texts):
            return self._rule(f"{text} {_literals(end.texts)}", "h", lazy=True)
        return f"{self._rule(text, 'T')} {_ending(end)}".rstrip()

    def _without(self, text: str, excludes: Listed[str], end: _End) -> str:
        """A text that has none of these in it. What ends it is not in it anyway."""
        known = end.texts if isinstance(end, _Texts) else ()
        others = [one for one in excludes if one not in known]
        if not others:
            return text
        within = self._rule(f"{_TEXT} {_literals(others)} {_TEXT}", "T")
        return self._rule(f"{text} & ~{within}", "T")

    def _other_tokens(self, excluded: Listed[int | str], end: _End) -> str:
        ids = {self._id(one) for one in excluded}.union(self._token_ids.ends)
        ids |= {end.token} if isinstance(end, _Token) else set()
        return f"<[^{','.join(map(str, sorted(ids)))}]>"

    def _end(self, end: str | list[str] | tags.Token) -> _Texts | _Token | None:
        """None: that of what is around it."""
        if isinstance(end, tags.Token):
            return _Token(self._id(end.token))
        texts = [end] if isinstance(end, str) else end
        if not any(texts):
            return None
        if not all(texts):
            raise ValueError("an end of a tag is empty, and another is not")
        return _Texts(tuple(texts))

    def _id(self, token: int | str) -> int:
        if isinstance(token, str):
            if token not in self._token_ids.of_names:
                raise ValueError(f"the tokenizer has no added token {token[:40]!r}")
            return self._token_ids.of_names[token]
        if token < 0:
            raise ValueError(f"{token} is no token")
        return token

    def _rule(self, body: str, kind: str, *, lazy: bool = False) -> str:
        """The name of a new rule; of a terminal where `kind` is "T"."""
        name = f"{kind}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


_CLOSED: Mapping[type, Callable[[_Writer, Any], str]] = {
    tags.JsonSchema: _Writer._json_schema,
    tags.GrammarText: _Writer._grammar,
    tags.Token: _Writer._token,
}
_OPEN: Mapping[type, Callable[[_Writer, Any, _End], str]] = {
    tags.AnyText: _Writer._any_text,
    tags.ExcludeToken: _Writer._exclude_token,
    tags.AnyTokens: _Writer._any_tokens,
    tags.Sequence: _Writer._sequence,
    tags.Or: _Writer._or,
    tags.Optional: _Writer._repeated,
    tags.Plus: _Writer._repeated,
    tags.Star: _Writer._repeated,
    tags.Repeat: _Writer._repeated,
    tags.Tag: _Writer._tag,
    tags.TagsWithSeparator: _Writer._separated,
    tags.TriggeredTags: _Writer._triggered,
    tags.TokenTriggeredTags: _Writer._token_triggered,
    tags.Dispatch: _Writer._dispatch,
    tags.TokenDispatch: _Writer._token_dispatch,
}


def _regular(format: Format) -> str | None:
    """The regular expression of a format, in Lark's terms; None: it has none."""
    match format:
        case tags.ConstString():
            return _literal(format.value)
        case tags.Regex():
            return f"/{regex_to_lark(format.pattern, '')}/"
        case tags.Sequence():
            return _all_regular(format.elements, " ")
        case tags.Or():
            return _all_regular(format.elements, " | ")
        case tags.Optional() | tags.Plus() | tags.Star() | tags.Repeat():
            content = _regular(format.content)
            return None if content is None else f"({content}){_times(format)}"
        case tags.Tag(begin=str() as begin, end=str() | list() as end):
            content = _regular(format.content)
            ends = [end] if isinstance(end, str) else end
            return None if content is None else f"({_literal(begin)} {content} {_literals(ends)})"
    return None


def _all_regular(formats: Listed[Format], between: str) -> str | None:
    parts = [_regular(one) for one in formats]
    known = [one for one in parts if one is not None]
    return f"({between.join(known) or _literal('')})" if len(known) == len(parts) else None


def _times(format: tags.Optional | tags.Plus | tags.Star | tags.Repeat) -> str:
    match format:
        case tags.Optional():
            return "?"
        case tags.Plus():
            return "+"
        case tags.Star():
            return "*"
    return f"{{{format.min},{'' if format.max < 0 else format.max}}}"


def _is_open(format: Format) -> bool:
    """Whether something has to end it."""
    match format:
        case tags.AnyText() | tags.TriggeredTags() | tags.Dispatch():
            return True
        case tags.Or():
            return any(_is_open(one) for one in format.elements)
        case tags.Sequence():
            return bool(format.elements) and _is_open(format.elements[-1])
    return False


def _by_trigger(format: tags.TriggeredTags) -> dict[str, list[tags.Tag]]:
    """The tags that each trigger begins."""
    groups: dict[str, list[tags.Tag]] = {one: [] for one in format.triggers}
    for one in groups:
        for other in groups:
            if one != other and one in other:
                raise ValueError(f"the trigger {one[:40]!r} is in the trigger {other[:40]!r}")
    for tag in format.tags:
        if not isinstance(tag.begin, str):
            raise ValueError("a tag of triggered_tags begins with a text")
        begins = [one for one in groups if tag.begin.startswith(one)]
        if not begins:
            raise ValueError(f"no trigger begins the tag {tag.begin[:40]!r}")
        groups[begins[0]].append(tag)
    for trigger, group in groups.items():
        if not group:
            raise ValueError(f"no tag begins with the trigger {trigger[:40]!r}")
    return groups


def _ending(end: _End) -> str:
    if isinstance(end, _Texts):
        return _literals(end.texts)
    return f"<[{end.token}]>" if isinstance(end, _Token) else ""


def _literals(texts: Listed[str]) -> str:
    return f"({' | '.join(map(_literal, texts))})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _endless(format: Format, ends: str) -> ValueError:
    name = type(format).__struct_config__.tag
    return ValueError(f"nothing ends {name}; what can is {ends} or the end of the output")
