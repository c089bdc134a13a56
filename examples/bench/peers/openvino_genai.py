"""OpenVINO GenAI: installed by pip, converted by optimum-intel, run through openvino_worker."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.contestants import Figures, Setting, decode_figures, stream_figures
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.jobs import Job, Kind, read_traces
from examples.bench.peers.processes import Command, Finished, run, run_step, seconds_to_first_line

REQUIREMENTS = (
    "torch==2.13.0",  # optimum-intel would take another
    "openvino-genai==2026.4.1.0",
    "optimum-intel==2.2.0",
)
BITS = {"int4": 4, "int8": 8}
_FORMATS = {
    # Products that are no linears, of a rotary embedding, have no groups of 128.
    "int4": (
        *("int4", "--group-size", "128", "--group-size-fallback", "ignore"),
        *("--ratio", "1.0", "--sym"),
    ),
    "int8": ("int8",),
}
STEP_TOKENS = 512
"""As many as a step of trtc's engines and a micro-batch of llama.cpp have here."""


@dataclass(frozen=True)
class OpenVino:
    """A contestant."""

    setting: Setting
    environment: PeerEnvironment
    dtype: str
    runtime: str = "OpenVINO GenAI"

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.dtype}"

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def model(self) -> Path:
        return self.setting.directory / "openvino" / self.dtype

    @property
    def read_bytes(self) -> int:
        """Embeddings are tied to the lm_head in the converted model too."""
        return (self.model / "openvino_model.bin").stat().st_size

    def decode(self, batch: int, seed: int) -> Figures:
        work = self.setting.work
        done = self._run("generate", work.prompts(batch, work.prompt_len, seed), work.decode_len)
        return decode_figures(read_traces(done), work.prompt_len, done.peak_rss)

    def start(self, seed: int) -> Figures:
        prompts = self.setting.work.prompts(1, self.setting.work.start_len, seed)
        job = self._job("first_token", prompts, 1)
        return {"first_token_s": seconds_to_first_line(self._command, stdin=job.to_json())}

    def streams(self, seed: int) -> Figures:
        work = self.setting.work
        prompts = work.prompts(work.streams, work.prompt_len, seed)
        done = self._run("generate", prompts, work.stream_len)
        return stream_figures(read_traces(done), done.peak_rss)

    def chat(self, seed: int, *, reuse: bool) -> Figures:
        work = self.setting.work
        done = self._run("chat", work.chat(seed), work.reply_len, prefix_cache=reuse)
        return {"chat_s": float(done.last_json())}

    def _run(
        self, kind: Kind, prompts: list[list[int]], output_len: int, *, prefix_cache: bool = False
    ) -> Finished:
        job = self._job(kind, prompts, output_len, prefix_cache=prefix_cache)
        return run(self._command, stdin=job.to_json())

    def _job(
        self, kind: Kind, prompts: list[list[int]], output_len: int, *, prefix_cache: bool = False
    ) -> Job:
        return Job(
            kind,
            str(self.model),
            prompts,
            output_len,
            self.setting.threads,
            warmup=self.setting.work.warmup(),
            prefix_cache=prefix_cache,
            step_tokens=STEP_TOKENS,
        )

    @property
    def _command(self) -> Command:
        return [self.environment.python, "-m", "examples.bench.peers.openvino_worker"]


def prepare(setting: Setting, environment: PeerEnvironment, dtypes: list[str]) -> list[OpenVino]:
    """Install, and convert what has not been converted yet.

    Raises:
        Unavailable: pip or the converter failed.
    """
    environment.install(REQUIREMENTS)
    if environment.version("torchvision"):
        # A dependency's dependency: one that was built for another torch breaks the import of
        # Transformers, and language models need none.
        environment.pip("uninstall", "--quiet", "--yes", "torchvision")
    contestants = [OpenVino(setting, environment, dtype) for dtype in dtypes]
    for one in contestants:
        if not one.model.exists():
            _export(one)
    return contestants


def _export(one: OpenVino) -> None:
    unfinished = one.model.with_name(one.dtype + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tool = one.environment.python.with_name("optimum-cli")
    command: Command = [tool, "export", "openvino", "--model", one.setting.checkpoint]
    command += ["--task", "text-generation-with-past"]
    command += ["--weight-format", *_FORMATS[one.dtype], unfinished]
    run_step(command, one.setting.logs / "openvino.log", {"HF_HUB_OFFLINE": "1"})
    unfinished.rename(one.model)


def versions(environment: PeerEnvironment) -> dict[str, str]:
    names = [one.split("==")[0] for one in REQUIREMENTS] + ["openvino", "nncf", "transformers"]
    return {name: environment.version(name) for name in names}
