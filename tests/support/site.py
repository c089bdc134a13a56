"""A server over the echo executor in a thread, for tests that drive a browser and so cannot be
asynchronous themselves."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.servers import CONFIG, EOS, TOKENIZER, EchoEngine, RunningServer, echo_server
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.http.port import HttpConfig
from trtc.runtime.server.app import ServerConfig

OPTIONS = EchoOptions(vocab_size=4096, num_pages=512, step_s=0.002, never=(EOS,))


class Site:
    """Args: options, tokenizer, names: of the engines, which are alike."""

    def __init__(
        self,
        options: EchoOptions = OPTIONS,
        tokenizer: Path = TOKENIZER,
        names: Sequence[str] = ("echo",),
        config: ServerConfig = CONFIG,
    ) -> None:
        self._engine = EchoEngine(options, tokenizer)
        self._names = names
        self._config = config
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Also again, on the same port."""
        http = HttpConfig(port=self.port)
        grpc = self._config.frontends[0]
        config = replace(self._config, frontends=(grpc, http))
        started: Future[RunningServer] = Future()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(config, started), name="site")
        self._thread.start()
        self.server = started.result(30)
        self.port = self.server.http_port

    def stop(self) -> None:
        """Drain and end. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(30)

    def drain(self) -> None:
        """Begin to, as at SIGTERM; the port still answers."""
        self._loop.call_soon_threadsafe(self.server.server.service.drain)

    def num_running(self) -> int:
        """Sequences that hold pages."""
        return self.server.handle(self._names[0]).loop.stats().running

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What the API answers."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def _run(self, config: ServerConfig, started: "Future[RunningServer]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(config, started))
        except BaseException as error:
            started.set_exception(error)
            raise
        finally:
            self._loop.close()

    async def _serve(self, config: ServerConfig, started: "Future[RunningServer]") -> None:
        async with echo_server(self._engine, names=self._names, config=config) as server:
            started.set_result(server)
            await self._stopping.wait()
