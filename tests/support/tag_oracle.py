"""The slow reference of structural tags: where a format can end in a text, by trying everything."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema

Format = dict[str, Any]


def matches(format: Format, text: str) -> bool:
    """Whether the whole text is of the format."""
    return len(text) in set(_ends(format, text, 0, ("",)))


def _ends(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    """Where the format can end that begins at `at`. Free text goes up to the first of `stops`;
    "" is the end of the text."""
    yield from set(_OF[format["type"]](format, text, at, stops))


def _const(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    if text.startswith(format["value"], at):
        yield at + len(format["value"])


def _regex(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    for end in range(at, len(text) + 1):
        if re.fullmatch(format["pattern"], text[at:end]):
            yield end


def _json_schema(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    for end in range(at + 1, len(text) + 1):
        part = text[at:end]
        try:
            document = json.loads(part)
            jsonschema.validate(document, format["json_schema"])
        except (ValueError, jsonschema.ValidationError):
            continue
        if part == part.strip():
            yield end


def _any_text(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    for end in _free(text, at, stops):
        part = text[at:end]
        is_short = format.get("max_chars") is None or len(part) <= format["max_chars"]
        if is_short and not any(one in part for one in format.get("excludes", ())):
            yield end


def _free(text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    """The place before the first stop."""
    found = [
        (text.find(stop, at) + len(stop), text.find(stop, at))
        for stop in stops
        if stop and stop in text[at:]
    ]
    if found:
        yield min(found)[1]
    elif "" in stops:
        yield len(text)


def _sequence(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    places, elements = {at}, format["elements"]
    for number, one in enumerate(elements):
        following = elements[number + 1 :]
        own = _first_text(following[0]) if following else stops
        places = {end for place in places for end in _ends(one, text, place, own)}
    yield from places


def _first_text(format: Format) -> tuple[str, ...]:
    return (format["value"],) if format["type"] == "const_string" else ()


def _or(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    for one in format["elements"]:
        yield from _ends(one, text, at, stops)


def _repeat(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    least, most = {
        "optional": (0, 1),
        "star": (0, len(text) + 1),
        "plus": (1, len(text) + 1),
    }.get(format["type"], (format.get("min", 0), format.get("max", 0)))
    places = {at}
    for times in range(most + 1):
        if times >= least:
            yield from places
        content = format["content"]
        places = {end for place in places for end in _ends(content, text, place, ())}


def _tag(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    if text.startswith(format["begin"], at):
        yield from _content(format, text, at + len(format["begin"]))


def _content(tag: Format, text: str, at: int) -> Iterator[int]:
    ends = (tag["end"],) if isinstance(tag["end"], str) else tuple(tag["end"])
    for place in _ends(tag["content"], text, at, ends):
        yield from (place + len(end) for end in ends if text.startswith(end, place))


def _triggered(format: Format, text: str, at: int, stops: tuple[str, ...]) -> Iterator[int]:
    def tags(place: int) -> set[int]:
        return {end for tag in format["tags"] for end in _tag(tag, text, place, ())}

    free = (*format["triggers"], *stops)
    places, seen = {at}, set[int]()
    if format.get("at_least_one"):
        places = tags(at)
        if format.get("stop_after_first"):
            yield from places
            return
    while places - seen:
        seen |= places
        heads = {end for place in places for end in _free(text, place, free)}
        for head in heads:
            if not any(text.startswith(one, head) for one in format["triggers"]):
                yield head
        places = {end for head in heads for end in tags(head)}
        if format.get("stop_after_first"):
            yield from places
            return


_OF: dict[str, Any] = {
    "const_string": _const,
    "regex": _regex,
    "json_schema": _json_schema,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "optional": _repeat,
    "star": _repeat,
    "plus": _repeat,
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered,
}


def random_format(rng: random.Random, depth: int = 2) -> Format:
    """One whose parts begin and end with marks of their own, in few letters."""
    kinds = [_random_const, _random_regex, _random_json]
    if depth:
        kinds += [_random_tag, _random_tag, _random_triggered, _random_parts, _random_repeat]
    return rng.choice(kinds)(rng, depth - 1)


def _random_const(rng: random.Random, depth: int) -> Format:
    return {"type": "const_string", "value": rng.choice(["a", "ab", "<a", "", "é"])}


def _random_regex(rng: random.Random, depth: int) -> Format:
    return {"type": "regex", "pattern": rng.choice(["a+", "(ab|b)*", "[a<]{1,3}", "b?/?a"])}


def _random_json(rng: random.Random, depth: int) -> Format:
    schema = rng.choice([{"enum": ["a", [1]]}, {"type": "array", "items": {"const": "b"}}])
    return {"type": "json_schema", "json_schema": schema}


def _random_tag(rng: random.Random, depth: int) -> Format:
    content = (
        {"type": "any_text", "excludes": rng.choice([[], ["ab"]])}
        if rng.random() < 0.4
        else random_format(rng, depth)
    )
    end = rng.choice(["</a>", ["</a>", "</b>"]])
    return {"type": "tag", "begin": rng.choice(["<a>", "<b>"]), "content": content, "end": end}


def _random_triggered(rng: random.Random, depth: int) -> Format:
    begins = rng.choice([("<a>",), ("<b>",), ("<a>", "<b>")])
    tags = [{**_random_tag(rng, depth), "begin": begin} for begin in begins]
    return {
        "type": "tag",
        "begin": "(",
        "content": {
            "type": "triggered_tags",
            "triggers": ["<"] if rng.random() < 0.2 else [one[:2] for one in begins],
            "tags": tags,
            "at_least_one": rng.random() < 0.3,
            "stop_after_first": rng.random() < 0.3,
        },
        "end": ")",
    }


def _random_parts(rng: random.Random, depth: int) -> Format:
    """Alternatives begin with different texts: of two that begin alike a lexer takes the longer."""
    elements = [{**_random_tag(rng, depth), "begin": begin} for begin in ("<a>", "<b>")]
    return {"type": rng.choice(["or", "or", "sequence"]), "elements": elements}


def _random_repeat(rng: random.Random, depth: int) -> Format:
    kind = rng.choice(["optional", "star", "plus", "repeat"])
    bounds = {"min": rng.randint(0, 2), "max": 2} if kind == "repeat" else {}
    return {"type": kind, "content": _random_tag(rng, depth), **bounds}


def random_text(format: Format, rng: random.Random) -> str:
    """A text that may be of the format: one of its own, sometimes with a letter changed."""
    text = _sample(format, rng)
    if text and rng.random() < 0.5:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "a", "<", ")", '"', "</a>"]) + text[at + 1 :]
    return text


def _sample(format: Format, rng: random.Random) -> str:
    kind = format["type"]
    if kind == "const_string":
        return str(format["value"])
    if kind == "regex":
        texts = ["a", "aa", "ab", "b", "", "<a", "b/a", "/a", "abb"]
        return rng.choice([one for one in texts if re.fullmatch(format["pattern"], one)])
    if kind == "json_schema":
        return rng.choice(['"a"', "[1]", '["b"]', "[]", '["b", "b"]'])
    if kind == "any_text":
        return rng.choice(["", "a", "b<", "ba</", "<a>"])
    if kind == "tag":
        ends = format["end"] if isinstance(format["end"], list) else [format["end"]]
        return str(format["begin"] + _sample(format["content"], rng) + rng.choice(ends))
    if kind == "or":
        return _sample(rng.choice(format["elements"]), rng)
    if kind == "sequence":
        return "".join(_sample(one, rng) for one in format["elements"])
    if kind == "triggered_tags":
        tags = [_sample(rng.choice(format["tags"]), rng) for _ in range(rng.randint(0, 2))]
        return "".join(rng.choice(["", "b", "<"]) + one for one in tags) + rng.choice(["", "a"])
    return "".join(_sample(format["content"], rng) for _ in range(rng.randint(0, 2)))
