"""/tokenize and /detokenize, against the tokenizer and over trtc.v1."""

import json
from typing import Any

from tests.support.aio import asynchronous
from tests.support.http1 import exchange, post
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import RunningServer, echo_server
from trtc.runtime.client import AsyncClient

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é 漢字"}]
TEXT = "def f(x):\n    return '\U0001f642'\n"


async def ask(server: RunningServer, path: str, **fields: Any) -> Any:
    answer = await exchange(server.http_port, post(path, json.dumps(fields).encode()))
    assert answer.status == 200, answer.body
    return answer.document


@asynchronous
async def test_texts_and_conversations_become_tokens_and_tokens_text() -> None:
    async with echo_server(ECHO) as server, AsyncClient(server.address) as client:
        for asked, expected in (
            ({"prompt": TEXT}, await client.tokenize(TEXT)),
            (
                {"prompt": TEXT, "add_special_tokens": False},
                await client.tokenize(TEXT, add_special_tokens=False),
            ),
            ({"messages": MESSAGES}, await client.tokenize_chat(MESSAGES)),
            (
                {"messages": MESSAGES, "add_generation_prompt": False},
                await client.tokenize_chat(MESSAGES, add_generation_prompt=False),
            ),
            ({"prompt": ""}, await client.tokenize("")),
        ):
            told = await ask(server, "/tokenize", model="echo", **asked)
            assert told == {
                "count": len(expected),
                "max_model_len": 1024,
                "tokens": list(expected),
                "token_strs": None,
            }
            text = (await ask(server, "/detokenize", tokens=told["tokens"]))["prompt"]
            assert text == await client.detokenize(expected, keep_special_tokens=True)
        assert (await ask(server, "/detokenize", tokens=[]))["prompt"] == ""


@asynchronous
async def test_tokens_of_a_conversation_are_a_prompt() -> None:
    """As gateways use it: tokenise, choose a server, and ask it by token ids."""
    async with echo_server(ECHO) as server, sdk(server) as client:
        tokens = (await ask(server, "/tokenize", messages=MESSAGES))["tokens"]
        options: Any = {"model": "echo", "max_tokens": 8, "temperature": 0}
        of_ids = await client.completions.create(prompt=tokens, **options)
        messages: Any = MESSAGES
        of_chat = await client.chat.completions.create(messages=messages, **options)
        assert of_ids.choices[0].text == of_chat.choices[0].message.content
