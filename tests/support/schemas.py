"""Random JSON schemas whose documents are short, and whether an engine keeps to them.

`python -m tests.support.schemas 10000` checks so many schemas, each with a way to sample.
"""

import json
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema

from tests.support.grammars import grammar_engine
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.request import FinishReason

Schema = dict[str, Any]

_FORMATS = ("uuid", "ipv4", "email")
"""Not dates and times: Python knows no year 0, and no leap seconds."""
_PATTERNS = ("^[a-f]{2,5}$", "^(x|yy)+z{1,3}$", "^\\d{3}-\\d{2}$")


def random_schema(rng: random.Random) -> Schema:
    """A schema of keywords that can be held, with short documents."""
    return _referring(rng) if rng.random() < 0.2 else _any(rng, 2)


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [
        _integer,
        _number,
        _string,
        _enum,
        _plain,
    ]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return rng.choice(kinds)(rng, depth - 1)


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + 3.5}


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)},
            {"type": "string", "format": rng.choice(_FORMATS)},
            {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 8},
        ]
    )


def _enum(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = ["a", 'é\n"', "", 1, -2.5, None, True, {"k": [1]}, ["x"], "日本"]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "a b", 'q"', "ünï", "tags"], rng.randint(1, 4))
    properties = {name: _any(rng, depth) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [_any(rng, depth) for _ in range(2)],
            "items": False,
            "minItems": 2,
        }
    return {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(2)]}


def _referring(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/x"}, "two": {"$ref": "#/$defs/x"}},
        "required": ["one"],
        "additionalProperties": False,
        "$defs": {"x": _any(rng, 1)},
    }


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Options of `generate`."""
    sampling: dict[str, Any] = rng.choice(
        [
            {"temperature": 0.0},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.5, "top_k": 5},
            {"min_p": 0.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"repetition_penalty": 1.3, "logit_bias": {5: 50.0, 2: -100.0}},
        ]
    )
    return sampling if sampling.get("temperature") == 0.0 else {**sampling, "n": rng.choice((1, 2))}


def check_outputs(engine: LocalEngine, seeds: Iterable[int]) -> tuple[int, int]:
    """How many outputs were whole, and are documents of their schemas, and how many were cut."""
    asked = []
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        sampling = random_sampling(rng)
        generation = engine.generate(
            [5, 6, seed % 99], json_schema=schema, max_tokens=900, seed=seed, **sampling
        )
        asked.append((schema, generation))
    outputs = [(schema, one) for schema, each in asked for one in each.result().completions]
    whole = [(schema, one) for schema, one in outputs if one.finish_reason is FinishReason.STOP]
    for schema, one in whole:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        validator.validate(json.loads(one.text))
    return len(whole), len(outputs) - len(whole)


def main(number: int) -> None:
    with grammar_engine() as engine:
        whole, cut = 0, 0
        for first in range(0, number, 200):
            numbers = check_outputs(engine, range(first, min(first + 200, number)))
            whole, cut = whole + numbers[0], cut + numbers[1]
    said = f"{whole} outputs are documents of their schemas, {cut} were cut at max_tokens"
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
