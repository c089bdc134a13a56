"""trtc: engines built from the same checkpoint, run through trtc_worker and `trtc serve`."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.contestants import Figures, Setting, decode_figures, stream_figures
from examples.bench.peers.jobs import Job, Kind, RawTrace, chat_seconds, read_traces
from examples.bench.peers.processes import (
    Command,
    python_env,
    run,
    run_step,
    seconds_to_first_line,
)
from examples.bench.peers.trtc_worker import complete_all
from examples.bench.served import TrtcServer, trtc_server
from trtc.protos.errors import EngineError
from trtc.protos.manifest import PLAN_FILE, read_manifest
from trtc.protos.plan import Plan, read_plan
from trtc.runtime.bench.load import ServerTarget
from trtc.runtime.client import AsyncClient, Client

BITS = {"int4": 4, "int4_awq": 4, "int8_sq": 8, "fp8": 8, "bf16": 16}
_CALIBRATED = ("int4_awq", "int8_sq", "fp8")
_GATHERED = "embedding.weight"
"""The table that embeddings are looked up in, where the lm_head has a copy of its own in the layout
of its kernel: a step reads a row a token of it. An int8 lm_head's table is both, and has another
name."""
_WORKER: Command = [sys.executable, "-m", "examples.bench.peers.trtc_worker"]


@dataclass(frozen=True)
class TrtcEngine:
    """A contestant."""

    setting: Setting
    dtype: str
    runtime: str = "trtc"

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.dtype}"

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def engine(self) -> Path:
        return self.setting.directory / "engines" / self.dtype

    @property
    def read_bytes(self) -> int:
        return read_bytes(read_plan(self.engine / PLAN_FILE))

    def decode(self, batch: int, seed: int) -> Figures:
        """Through scheduler and engine loop in one process."""
        work = self.setting.work
        prompts = work.prompts(batch, work.prompt_len, seed)
        done = run(_WORKER, stdin=self._job("generate", prompts, work.decode_len).to_json())
        return decode_figures(read_traces(done), work.prompt_len, done.peak_rss)

    def start(self, seed: int) -> Figures:
        prompts = self.setting.work.prompts(1, self.setting.work.start_len, seed)
        job = self._job("first_token", prompts, 1)
        return {"first_token_s": seconds_to_first_line(_WORKER, stdin=job.to_json())}

    def streams(self, seed: int) -> Figures:
        """Over gRPC."""
        work = self.setting.work
        with self._serving() as served:
            traces = asyncio.run(
                _streams(
                    served.address,
                    work.warmup(),
                    work.prompts(work.streams, work.prompt_len, seed),
                    work.stream_len,
                )
            )
            return stream_figures(traces, served.server.peak_rss())

    def chat(self, seed: int, *, reuse: bool) -> Figures:
        """Over gRPC."""
        work = self.setting.work
        more = () if reuse else ("--no-prefix-cache",)
        with self._serving(*more) as served, Client(served.address) as client:

            def complete(prompt: Sequence[int], output_len: int) -> list[int]:
                done = client.generate(
                    prompt, max_tokens=output_len, temperature=0.0, ignore_eos=True
                )
                return list(done.result().token_ids)

            complete(work.warmup(), 2)
            return {"chat_s": chat_seconds(complete, work.chat(seed), work.reply_len)}

    def _job(self, kind: Kind, prompts: list[list[int]], output_len: int) -> Job:
        warmup = self.setting.work.warmup()
        return Job(
            kind,
            str(self.engine),
            prompts,
            output_len,
            self.setting.threads,
            warmup,
            dummy_weights=self._has_dummies,
        )

    def _serving(self, *more: str) -> AbstractContextManager[TrtcServer]:
        dummy = ("--dummy-weights",) if self._has_dummies else ()
        return trtc_server(self.engine, "--threads", str(self.setting.threads), *dummy, *more)

    @property
    def _has_dummies(self) -> bool:
        return read_manifest(self.engine).dummy_weights


def prepare(
    setting: Setting, calibration: Path | None, dtypes: list[str], rebuild: bool
) -> list[TrtcEngine]:
    """Build what has not been built yet, or by a trtc that wrote other engines, or everything, each
    in a process of its own.

    Args:
        calibration: None: the engines' weights are dummies.

    Raises:
        Unavailable: a build failed.
    """
    engines = [TrtcEngine(setting, dtype) for dtype in dtypes]
    for one in engines:
        if rebuild or not _is_readable(one.engine):
            command: Command = [sys.executable, "-m", "examples.bench.peers.trtc_build"]
            command += [setting.checkpoint, one.engine, one.dtype, str(setting.work.streams)]
            if calibration is None:
                command.append("--dummy")
            elif one.dtype in _CALIBRATED:
                command.append(calibration)
            run_step(command, setting.logs / "trtc.log", python_env())
    return engines


def _is_readable(engine: Path) -> bool:
    try:
        read_manifest(engine)
    except EngineError:
        return False
    return True


def read_bytes(plan: Plan) -> int:
    """Of the weights that a greedy step of one sequence reads: not the table that embeddings are
    looked up in, and of the lm_head's two planes one."""
    return sum(
        weight.bytes // (2 if weight.layout == "planes" else 1)
        for weight in plan.weights
        if weight.name != _GATHERED
    )


async def _streams(
    address: str, warmup: Sequence[int], prompts: Sequence[Sequence[int]], output_len: int
) -> list[RawTrace]:
    async with AsyncClient(address) as client:
        target = ServerTarget(client, "")
        await complete_all(target, [warmup], 2)
        return await complete_all(target, prompts, output_len)
