"""A server whose model says what a script says: templates, parsers and dialects are real.

The script calls a tool for two cities at once, and repeats what the calls gave. It writes thoughts
and calls in the hermes notation.
"""

import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tests.support.chat_templates import CHATML_WITH_TOOLS
from tests.support.servers import CONFIG, EOS, TOKENIZER, EchoEngine, RunningServer, serve_executor
from tests.support.shared_text import shared_tokenizer
from trtc.runtime.executors.base import Float32s, StepBatch
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.server.app import Server
from trtc.runtime.text.tokenizer import Tokenizer

THOUGHT = "Two cities, two calls."
LOOKING = "Let me look."
CITIES = ("Paris", "Oslo")
_HEAD = "<|im_start|>assistant\n"


def weather(city: str) -> str:
    """What the tool of the tests gives."""
    return f"{city} has {len(city)} degrees"


FINAL = "I see: " + "; ".join(weather(city) for city in CITIES) + "."


def script(prompt: str) -> str:
    """The answer to a prompt in the chat template."""
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    if results:
        return f"I see: {'; '.join(results)}."
    if "<tools>" not in prompt:
        return f"<think>\n{THOUGHT}\n</think>\n\nThere are no tools."
    calls = [json.dumps({"name": "get_weather", "arguments": {"city": one}}) for one in CITIES]
    written = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)
    return f"<think>\n{THOUGHT}\n</think>\n\n{LOOKING}\n{written}"


class ScriptedExecutor(EchoExecutor):
    """Its likeliest token is the script's next one."""

    def __init__(self, tokenizer: Tokenizer, script: Callable[[str], str]) -> None:
        super().__init__(EchoOptions(vocab_size=4096, num_pages=1024, max_seq_len=2048))
        self._tokenizer = tokenizer
        self._script = script

    def logits(self, batch: StepBatch) -> Float32s:
        logits = super().logits(batch)
        sequences = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
        for at, (sequence, row) in enumerate(zip(sequences, batch.logit_rows, strict=True)):
            after = int(batch.query_start[sequence + 1]) - 1 - int(row)
            places = np.arange(int(batch.context_lens[sequence]) - after)
            context = self._read_tokens(batch, int(row), places, batch.page_table[sequence])
            logits[at, self._next(context.tolist())] = 1000.0
        return logits

    def _next(self, context: list[int]) -> int:
        text = self._tokenizer.decode(context, skip_special=False)
        prompt, _, said = text.rpartition(_HEAD)
        whole = self._script(prompt)
        if not whole.startswith(said) or whole == said:
            return EOS
        return self._tokenizer.encode(whole[len(said) :], add_special_tokens=False)[0]


def chat_tokenizer(directory: Path, template: str = CHATML_WITH_TOOLS) -> Path:
    """A copy of the bundled tokenizer with another template."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(TOKENIZER / "tokenizer.json", directory)
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@asynccontextmanager
async def scripted_server(
    directory: Path, script: Callable[[str], str] = script
) -> AsyncIterator[RunningServer]:
    """A started server of one engine, `echo`, over the tokenizer of a directory."""
    tokenizer = shared_tokenizer(directory)
    engine = EchoEngine(tokenizer=directory, answer_format="hermes")
    executor = ScriptedExecutor(tokenizer, script)
    server = Server(
        CONFIG, opener=lambda source, config: serve_executor(executor, engine, source.name, config)
    )
    try:
        await server.start()
        yield RunningServer(server)
    finally:
        await server.close()
