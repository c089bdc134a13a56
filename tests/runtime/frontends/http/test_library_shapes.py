"""Libraries that applications are written with get objects of their classes from a small model."""

from collections.abc import Iterator

import pytest

from tests.support.aio import asynchronous
from tests.support.engines import build_tiny
from tests.support.libraries import MESSAGES, Question
from tests.support.library_process import Libraries
from tests.support.library_shapes import SHAPED, SHAPED_BY_TOOLS, Record
from tests.support.servers import TOKENIZER
from tests.support.serving import Serving
from trtc.runtime.client import Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Address over gRPC and HTTP port of `trtc serve` with the bundled model."""
    path = tmp_path_factory.mktemp("engines") / "pyllama"
    build_tiny(
        TOKENIZER,
        path,
        "bf16",
        max_seq_len=2048,
        max_batch_size=4,
        max_num_tokens=128,
        answer_format="hermes",
    )
    serving = Serving(f"echo={path}")
    try:
        found = serving.wait_for(r"serving .*grpc=(127.0.0.1:\d+) http=.*:(\d+)")
        yield found[1], int(found[2])
    finally:
        serving.stop()


@pytest.fixture(scope="module")
def expected(server: tuple[str, int]) -> Record:
    """The same over trtc.v1: the oracle."""
    with Client(server[0]) as client:
        answer = client.chat(
            MESSAGES, json_schema=Record.model_json_schema(), temperature=0.0, max_tokens=300
        ).result()
    return Record.model_validate_json(answer.text)


@pytest.mark.parametrize("name", SHAPED)
@asynchronous
async def test_an_answer_is_an_object_of_a_class(
    name: str, process: Libraries, server: tuple[str, int], expected: Record
) -> None:
    (answer,) = await process.ask(name, "shaped", Question(server[1], 300))
    assert not answer.errors, answer
    assert Record.model_validate_json(answer.text) == expected


@pytest.mark.parametrize("name", SHAPED_BY_TOOLS)
@asynchronous
async def test_arguments_of_a_call_are_an_object_of_a_class(
    name: str, process: Libraries, server: tuple[str, int]
) -> None:
    (answer,) = await process.ask(name, "shaped by tools", Question(server[1], 300))
    assert not answer.errors, answer
    Record.model_validate_json(answer.text)
