"""A client of llama-server's own HTTP interface; it takes and gives token ids."""

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from examples.bench.peers.failures import RunFailed
from examples.bench.peers.jobs import RawTrace
from examples.bench.peers.processes import http_ok

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class LlamaServer:
    """A server on loopback."""

    port: int

    def is_ready(self) -> bool:
        return http_ok(self.port, "/health")

    def complete(self, prompt: Sequence[int], output_len: int, *, reuse: bool) -> list[int]:
        """Token ids of one completion."""
        connection = self._post(prompt, output_len, reuse=reuse, stream=False)
        try:
            tokens: list[int] = json.load(_ok(connection))["tokens"]
            return tokens
        finally:
            connection.close()

    def stream(self, prompt: Sequence[int], output_len: int) -> RawTrace:
        """One completion, event by event. A token that ends amid a character has no event of its
        own: it comes with the next."""
        trace, came = RawTrace(time.perf_counter(), []), 0
        connection = self._post(prompt, output_len, reuse=False, stream=True)
        try:
            for line in _ok(connection):
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                predicted = json.loads(line[6:])["tokens_predicted"]
                if predicted > came:
                    trace.arrivals.append((now, predicted - came))
                    came = predicted
        finally:
            connection.close()
        if came != output_len:
            raise RunFailed(f"llama-server sent {came} of {output_len} tokens")
        return trace

    def streams(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[RawTrace]:
        """All at once, a thread each."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.stream(prompt, output_len), prompts))

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)

    def _post(
        self, prompt: Sequence[int], output_len: int, *, reuse: bool, stream: bool
    ) -> http.client.HTTPConnection:
        body = {
            "prompt": list(prompt),
            "n_predict": output_len,
            "cache_prompt": reuse,
            "ignore_eos": True,
            "return_tokens": True,
            "stream": stream,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
        }
        connection = self._connect()
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection


def _ok(connection: http.client.HTTPConnection) -> Any:
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        raise RunFailed(f"llama-server answered {response.status}: {response.read()[:200]!r}")
    return response
