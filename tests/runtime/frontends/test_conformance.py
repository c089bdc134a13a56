"""One table of requests by every way in: the same tokens everywhere."""

import pytest

from tests.support.aio import asynchronous
from tests.support.dialects import DIALECTS, ENGINE, Case
from tests.support.servers import echo_server, greedy

CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "def f("}]},
)
IDS = (5, 17, 9)
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "yy"]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}

CASES = {
    "ids": Case(IDS, [[3173, 2541, 3593, 1892, 707, 1861]], {"max_tokens": 6, "temperature": 0.0}),
    "text": Case(
        "import os\n", [[1559, 2212, 1682, 3689, 46, 3170]], {"max_tokens": 6, "temperature": 0.0}
    ),
    "chat": Case(
        CHAT, [[3671, 3668, 1859, 3165, 721, 1969]], {"max_tokens": 6, "temperature": 0.0}
    ),
    "seed": Case(IDS, [[3907, 1628, 32, 1526, 1156, 1438]], {"max_tokens": 6, "seed": 7}),
    "large seed": Case(
        "import os\n",
        [[818, 121, 2453, 1530, 2735, 616]],
        {"max_tokens": 6, "seed": 2**63 - 1, "temperature": 0.3},
    ),
    "filters": Case(
        IDS,
        [[2978, 785, 3704, 760, 3938, 2722]],
        {
            "max_tokens": 6,
            "seed": 3,
            "temperature": 0.75,
            "top_k": 20,
            "top_p": 0.875,
            "min_p": 0.0625,
        },
    ),
    "penalties": Case(
        (5, 17, 0, 148),  # whose likeliest next token is 17
        [[3434, 1194, 3349, 2717]],
        {
            "max_tokens": 4,
            "seed": 5,
            "top_k": 2,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
        },
    ),
    "frequency": Case(
        IDS,
        [[322, 321, 321, 322, 321, 2325, 3751, 322]],
        {
            "max_tokens": 8,
            "temperature": 0.0,
            "frequency_penalty": 1.5,
            "logit_bias": {321: 6.0, 322: 5.0},
        },
    ),
    "bias": Case(
        IDS,
        [[321, 321, 321, 321]],
        {"max_tokens": 4, "temperature": 0.0, "logit_bias": {321: 100.0}},
    ),
    "sequences": Case(
        IDS,
        [[3670, 1633, 2415, 3055], [1258, 2720, 2860, 4034], [2127, 669, 3558, 1409]],
        {"max_tokens": 4, "n": 3, "seed": 11},
    ),
    "chat filters": Case(
        CHAT,
        [[3646, 999, 3476, 714, 3922, 1629]],
        {
            "max_tokens": 6,
            "seed": 3,
            "temperature": 0.75,
            "top_k": 20,
            "top_p": 0.875,
            "min_p": 0.0625,
            "repetition_penalty": 1.5,
            "logit_bias": {1859: -50.0},
        },
    ),
    "chat stop token": Case(
        CHAT,
        [[3671, 3668, 1859]],
        {"max_tokens": 12, "temperature": 0.0, "stop_token_ids": [1859]},
    ),
    "chat sequences": Case(
        CHAT,
        [[3671, 1635, 2657, 3000], [1259, 2944, 2830, 4048]],
        {"max_tokens": 4, "n": 2, "seed": 11, "top_p": 0.5},
    ),
    "schema of ids": Case(
        IDS,
        [[94, 263, 359, 270, 404, 277, 3008, 5]],
        {"max_tokens": 8, "temperature": 0.0, "json_schema": SCHEMA},
    ),
    "schema of a text": Case(
        "import os\n",
        [[94, 5, 69, 554, 2194, 2194, 1568, 2114]],
        {"max_tokens": 8, "temperature": 0.0, "json_schema": SCHEMA},
    ),
    "schema of a chat": Case(
        CHAT,
        [[94, 2687, 262, 3704, 404, 3632, 5, 69]],
        {"max_tokens": 8, "temperature": 0.0, "json_schema": SCHEMA},
    ),
    "stop token": Case(
        IDS, [[3173, 2541, 3593]], {"max_tokens": 12, "temperature": 0.0, "stop_token_ids": [3593]}
    ),
    "min tokens": Case(
        IDS,
        [[3173, 2541, 3593, 1892, 707, 1861, 1486, 1355]],
        {"max_tokens": 8, "min_tokens": 8, "temperature": 0.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
@asynchronous
async def test_a_request_gives_its_tokens_by_every_way_in(case: str) -> None:
    asked = CASES[case]
    async with echo_server(ENGINE) as server:
        told = {name: await ask(server, asked) for name, ask in DIALECTS.items()}
        await server.idle()
    assert {name: tokens for name, tokens in told.items() if tokens is not None} == {
        name: asked.expected for name in told if told[name] is not None
    }


def test_the_likeliest_tokens_are_those_of_the_model() -> None:
    """The table's tokens by its oracle, which samples nothing."""
    for name in ("ids", "min tokens"):
        asked = CASES[name]
        (expected,) = asked.expected
        assert expected == greedy(IDS, len(expected), ENGINE.options)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_way_in_has_words_for_a_plain_case(dialect: str) -> None:
    """None is for what a protocol cannot say: a dialect that says nothing at all is a mistake."""

    @asynchronous
    async def ask() -> None:
        async with echo_server(ENGINE) as server:
            told = [
                await DIALECTS[dialect](server, CASES[case]) for case in ("ids", "text", "chat")
            ]
            assert any(told)

    ask()
