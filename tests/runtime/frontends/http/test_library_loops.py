"""Libraries that applications are written with let a model call a tool, and answer with what it
gave."""

import asyncio
from pathlib import Path

import pytest

from tests.support.aio import asynchronous
from tests.support.libraries import Question
from tests.support.library_loops import CALLED
from tests.support.library_process import Libraries
from tests.support.scripted import FINAL, chat_tokenizer, scripted_server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", CALLED)
@asynchronous
async def test_two_calls_are_run_and_what_they_gave_is_answered(
    name: str, process: Libraries, tokenizer: Path
) -> None:
    async with asyncio.timeout(60), scripted_server(tokenizer) as server:
        (answer,) = await process.ask(name, "called", Question(server.http_port, 300))
        assert not answer.errors, answer
        assert answer.text == FINAL
        await server.idle()
