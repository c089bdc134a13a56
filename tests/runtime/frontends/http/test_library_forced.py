"""Libraries that applications are written with let a small model call a tool, which they force it
to, run the tool, and have it answer."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.aio import asynchronous
from tests.support.engines import build_tiny
from tests.support.libraries import Question
from tests.support.library_loops import CALL_GRAMMAR, FORCED, NAME
from tests.support.library_process import Libraries
from tests.support.scripted import chat_tokenizer
from tests.support.servers import TOKENIZER
from tests.support.serving import Serving
from trtc.builder.grammar_files import parse_grammars
from trtc.runtime.engine.probe import Probe

GRAMMAR = (
    '<tool_call>\\n\\{"name": "'
    + NAME
    + '", "arguments": \\{"city": "[a-z]{1,8}"\\}\\}\\n</tool_call>'
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of `trtc serve` with the bundled model, and a template that shows tools and their results."""
    directory = tmp_path_factory.mktemp("engines")
    model = Path(shutil.copytree(TOKENIZER, directory / "model"))
    chat_tokenizer(model)
    (directory / "call.regex").write_text(GRAMMAR)
    build_tiny(
        model,
        directory / "pyllama",
        "bf16",
        max_seq_len=2048,
        max_batch_size=4,
        max_num_tokens=128,
        eval_tokens=0,
        grammars=parse_grammars([f"{CALL_GRAMMAR}={directory}/call.regex"]),
        probe=Probe(1),
    )
    serving = Serving(f"echo={directory / 'pyllama'}")
    try:
        yield int(serving.wait_for(r"serving .*grpc=127.0.0.1:\d+ http=.*:(\d+)")[1])
    finally:
        serving.stop()


@pytest.mark.parametrize("name", FORCED)
@asynchronous
async def test_a_forced_call_is_run_and_answered(name: str, process: Libraries, port: int) -> None:
    (answer,) = await process.ask(name, "forced", Question(port, 80))
    assert not answer.errors, answer
    assert answer.called
    for gave in answer.called:  # it may do so again
        assert re.fullmatch(r"(?s).{0,8} has \d degrees", gave)
    assert answer.text
