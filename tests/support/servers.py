"""Servers over the echo executor: everything is real but the model.

`echo_server` runs one in the test's own event loop; `python -m tests.support.servers` is one in a
process of its own, for tests that kill it.
"""

import argparse
import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.shared_text import SharingGrammars, shared_tokenizer
from trtc.protos.manifest import ByteLedger, Canary, Manifest, ModelFacts, SchemeFacts, TargetFacts
from trtc.protos.sampling import NO_DEFAULTS, SamplingDefaults
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.base import FrontendConfig
from trtc.runtime.frontends.grpc.frontend import GrpcConfig
from trtc.runtime.frontends.http.port import HttpConfig
from trtc.runtime.host.line_log import LineLogConfig
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.request_defaults import request_defaults
from trtc.runtime.scheduling.scheduler_state import OVERDUE_S
from trtc.runtime.server.app import Server, ServerConfig
from trtc.runtime.service.access import AccessConfig
from trtc.runtime.service.audit import AuditConfig
from trtc.runtime.service.exposition import Exposition
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.wire.tls import ServerTls

TOKENIZER = Path(__file__).parents[2] / "examples" / "models" / "pyllama"
EOS = 2


def frontends(
    host: str = "127.0.0.1",
    *,
    grpc_port: int = 0,
    http_port: int = 0,
    tls: ServerTls | None = None,
) -> tuple[FrontendConfig, ...]:
    """Both of `trtc serve`; port 0: any free one."""
    return (GrpcConfig(host, grpc_port, tls), HttpConfig(host, http_port, tls))


CONFIG = ServerConfig(
    engines=(EngineSource("echo", Path("echo")),),
    frontends=frontends(),
    drain_timeout_s=10.0,
)


@dataclass(frozen=True)
class EchoEngine:
    """What the fake engine directory would hold."""

    options: EchoOptions = field(default_factory=EchoOptions)
    tokenizer: Path | None = None
    canaries: tuple[Canary, ...] = ()
    overdue_s: float = OVERDUE_S
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    canary_tolerance: float = 0.0
    eos: tuple[int, ...] = (EOS,)
    """Tokens that end a sequence."""
    answer_format: str = "none"
    """How it writes thoughts and calls."""
    grammars: Mapping[str, Grammar] = field(default_factory=dict)
    """Its own, by their names."""


def manifest(engine: EchoEngine, executor: Executor) -> Manifest:
    """A manifest that fits the executor."""
    return Manifest(
        trtc_version="0",
        model=ModelFacts(
            name="echo",
            family="echo",
            architecture="EchoForCausalLM",
            vocab_size=executor.vocab_size,
            hidden_size=1,
            num_layers=1,
            num_parameters=0,
            max_position_embeddings=executor.limits.max_seq_len,
            bos_token_id=None,
            eos_token_ids=engine.eos,
            pad_token_id=None,
            sampling_defaults=engine.sampling_defaults,
        ),
        scheme=SchemeFacts(
            name="fp32",
            kv_dtype="f32",
            source="inline",
            exact_activations=True,
            calibration_sha256=None,
        ),
        target=TargetFacts(kind="cpu", name="cpu:echo", archs=("echo",), toolchain="none"),
        kv=executor.kv,
        limits=executor.limits,
        ledger=ByteLedger(weights=0, activations=0, page=executor.kv.page_bytes),
        has_tokenizer=engine.tokenizer is not None,
        answer_format=engine.answer_format,
        canaries=engine.canaries,
        canary_tolerance=engine.canary_tolerance,
        files={},
    ).sealed()


def open_echo(engine: EchoEngine, name: str, config: EngineConfig) -> EngineHandle:
    return serve_executor(EchoExecutor(engine.options), engine, name, config)


def serve_executor(
    executor: Executor, engine: EchoEngine, name: str, config: EngineConfig
) -> EngineHandle:
    """The running loop of an executor that echoes."""
    tokenizer = shared_tokenizer(engine.tokenizer) if engine.tokenizer is not None else None
    facts = manifest(engine, executor)
    loop = EngineLoop(
        executor,
        tokenizer,
        LoopConfig(
            eos_token_ids=engine.eos,
            defaults=request_defaults(facts.model, config.generation_config),
            max_queue=config.max_queue,
            prefix_cache=config.prefix_cache,
            kv_host_bytes=config.kv_host_bytes,
            kv_events=config.kv_events,
            overdue_s=engine.overdue_s,
        ),
    )
    loop.start()

    grammars = SharingGrammars(tokenizer, facts.model.vocab_size, (EOS,), engine.grammars)
    grammars.prepare(name)

    def close() -> None:
        grammars.close()
        executor.close()

    return EngineHandle(
        name=name,
        manifest=facts,
        tokenizer=tokenizer,
        num_pages=executor.num_pages,
        loop=loop,
        grammars=grammars,
        close=close,
    )


@dataclass(frozen=True)
class RunningServer:
    server: Server

    @property
    def address(self) -> str:
        return self.server.frontends["grpc"].address

    @property
    def http_port(self) -> int:
        return self.server.frontends["http"].port

    def handle(self, name: str = "echo") -> EngineHandle:
        return self.server.service.engines[name]

    def num_refused(self) -> float:
        """Requests that limits have kept out so far."""
        return sum(
            sample.value
            for metric in Exposition(self.server.service.metrics).registry.collect()
            for sample in metric.samples
            if sample.name == "trtc_request_refused_total"
        )

    async def idle(self, name: str = "echo", timeout: float = 10.0) -> None:
        """Wait until no page is held and nothing waits: a leak fails here."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            stats = self.handle(name).loop.stats()
            if not (stats.running or stats.waiting or stats.pages_used):
                assert stats.pages_free + stats.pages_cached == stats.pages_total
                return
            assert asyncio.get_running_loop().time() < deadline, f"not idle: {stats}"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def echo_server(
    engine: EchoEngine | None = None,
    *,
    names: Sequence[str] = ("echo",),
    config: ServerConfig = CONFIG,
) -> AsyncIterator[RunningServer]:
    """A started server; on the way out it drains and must leave nothing behind."""
    echo = engine or EchoEngine()
    config = replace(config, engines=tuple(EngineSource(name, Path(name)) for name in names))
    server = Server(config, opener=lambda source, config: open_echo(echo, source.name, config))
    try:
        await server.start()
        yield RunningServer(server)
    finally:
        await server.close()


def greedy(prompt: Sequence[int], max_tokens: int, options: EchoOptions | None = None) -> list[int]:
    """What the engine must answer at temperature 0, end of sequence ignored."""
    return list(EchoExecutor(options or EchoOptions()).greedy(prompt, max_tokens))


@dataclass(frozen=True)
class ServerProcess:
    process: "subprocess.Popen[str]"
    address: str


@contextmanager
def echo_process(*arguments: str) -> Iterator[ServerProcess]:
    """A server in a process of its own; it is killed on the way out if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield ServerProcess(process, line.strip())
    finally:
        process.kill()
        process.communicate()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--drain-timeout", type=float, default=10.0)
    parser.add_argument("--max-streams", type=int, default=ServiceLimits.max_streams)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--audit-log", type=Path)
    parser.add_argument("--api-keys", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO")
    audit_log = arguments.audit_log
    config = replace(
        CONFIG,
        drain_timeout_s=arguments.drain_timeout,
        limits=ServiceLimits(max_streams=arguments.max_streams),
        access=AccessConfig(arguments.api_keys),
        audit=None if audit_log is None else AuditConfig(LineLogConfig(audit_log)),
    )
    vocab_size = 512 if arguments.tokenizer is None else 4096
    options = EchoOptions(
        vocab_size=vocab_size, num_pages=2048, step_s=arguments.step_s, never=(EOS,)
    )
    asyncio.run(_serve(EchoEngine(options, arguments.tokenizer), config))


async def _serve(echo: EchoEngine, config: ServerConfig) -> None:
    server = Server(
        config,
        opener=lambda source, config: open_echo(echo, source.name, config),
    )
    running = asyncio.create_task(server.run())
    while not running.done() and server.service.why_not_ready():
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{server.frontends['grpc'].address}\n")
    sys.stdout.flush()
    await running


if __name__ == "__main__":
    _main()
