"""A process of its own for unmodified libraries.

They block event loops, leave sockets to the garbage collector and read settings from the
environment, so a test talks with them over pipes: `python -m tests.support.library_process`, a JSON
line in, a JSON line out.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.support.libraries import LIBRARIES, Answer, Ask, Question
from tests.support.library_loops import CALLED, FORCED
from tests.support.library_shapes import SHAPED, SHAPED_BY_TOOLS

_ENVIRONMENT = {
    # Nothing is asked of anybody else, and nothing told.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONWARNINGS": "ignore",
    # Nor is any authority trusted: each client would read all certificates of the system's.
    "SSL_CERT_FILE": "",
    "SSL_CERT_DIR": str(Path(__file__).parent),
}

ASKED: Mapping[str, Mapping[str, Ask]] = {
    "whole": {name: one.whole for name, one in LIBRARIES.items()},
    "streamed": {name: one.streamed for name, one in LIBRARIES.items()},
    "left": {name: one.left for name, one in LIBRARIES.items() if one.left},
    "shaped": SHAPED,
    "shaped by tools": SHAPED_BY_TOOLS,
    "called": CALLED,
    "forced": FORCED,
}
"""How a library is asked -> its name -> the function that asks."""


class Libraries:
    """The process that has them."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    async def ask(self, library: str, how: str, *questions: Question) -> list[Answer]:
        """Ask all at once; `how` and `library` are keys of ASKED."""
        asked = {"library": library, "how": how, "questions": [asdict(one) for one in questions]}
        line = await asyncio.to_thread(self._exchange, json.dumps(asked))
        found = [{**one, "errors": tuple(one["errors"])} for one in json.loads(line)]
        return [Answer(**{**one, "called": tuple(one["called"])}) for one in found]

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process of the libraries has ended"
        return answer


@contextmanager
def libraries() -> Iterator[Libraries]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.library_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
        cwd=Path(__file__).parents[2],
    )
    try:
        yield Libraries(process)
    finally:
        process.kill()
        process.communicate()


async def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        ask = ASKED[asked["how"]][asked["library"]]
        questions = [Question(**one) for one in asked["questions"]]
        found = await asyncio.gather(*(_answer(ask, one) for one in questions))
        answers.write(json.dumps([asdict(one) for one in found]) + "\n")
        answers.flush()


async def _answer(ask: Ask, question: Question) -> Answer:
    try:
        async with asyncio.timeout(60):
            return await ask(question)
    except Exception as error:  # noqa: BLE001 (told to the test)
        classes = [one.__name__ for one in type(error).__mro__]
        return Answer(errors=classes, message=str(error))


if __name__ == "__main__":
    asyncio.run(_serve())
