"""The unmodified `openai` SDK over the HTTP port of a server."""

from dataclasses import replace

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.support.servers import EOS, TOKENIZER, EchoEngine, RunningServer
from trtc.runtime.executors.echo import EchoOptions

ECHO = EchoEngine(EchoOptions(vocab_size=4096, never=(EOS,)), tokenizer=TOKENIZER)
"""Answers with tokens of pyllama's vocabulary, and never ends by itself."""

SLOW = replace(ECHO, options=replace(ECHO.options, step_s=0.01))
SLOWER = replace(ECHO, options=replace(ECHO.options, step_s=0.03))
"""900 tokens take half a minute: what is idle before was ended."""


def sdk(server: RunningServer, api_key: str = "none") -> AsyncOpenAI:
    """A client that asks once."""
    return AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.http_port}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=30,
        http_client=DefaultAsyncHttpxClient(verify=False),  # authorities take long to read
    )
