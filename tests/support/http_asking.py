"""A server with small limits, and documents posted to it, for tests of bad input over HTTP."""

import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from tests.support.http1 import Answer, exchange, post
from tests.support.openai_sdk import ECHO
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.service.limits import ServiceLimits


def limited() -> AbstractAsyncContextManager[RunningServer]:
    limits = ServiceLimits(max_prompt_bytes=10_000, max_chat_messages=32, max_request_bytes=1 << 19)
    return echo_server(ECHO, config=replace(CONFIG, limits=limits))


async def ask(server: RunningServer, path: str, document: dict[str, Any]) -> Answer:
    return await exchange(server.http_port, post(path, json.dumps(document).encode()))
