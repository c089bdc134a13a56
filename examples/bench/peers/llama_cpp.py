"""llama.cpp: the sources that llama-cpp-python ships, compiled for this CPU, with their own tools.

The package's Python API decodes one sequence, so llama.cpp is run by what it measures and serves
itself with: llama-batched-bench and llama-server.
"""

import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.contestants import Figures, Setting, stream_figures
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.jobs import chat_seconds
from examples.bench.peers.llama_server import LlamaServer
from examples.bench.peers.processes import Command, Server, free_port, run, run_step, serving

PACKAGE = "llama-cpp-python==0.3.36"
CONVERTER_REQUIREMENTS = (
    "torch==2.13.0",
    "transformers==5.2.0",
    "sentencepiece==0.2.1",
    "protobuf==7.35.1",
    "pyyaml==6.0.3",
)
_TOOLS = ("llama-batched-bench", "llama-server", "llama-quantize")
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
    "-DLLAMA_OPENSSL=OFF",
)
BITS = {"Q4_0": 4, "Q8_0": 8, "bf16": 16}


@dataclass(frozen=True)
class LlamaCppBuild:
    """Where sources and tools are."""

    directory: Path
    log: Path

    @property
    def source(self) -> Path:
        return self.directory / "source" / "vendor" / "llama.cpp"

    def tool(self, name: str) -> Path:
        return self.directory / "out" / "bin" / name

    def make(self, environment: PeerEnvironment) -> None:
        """Download and compile what is not there yet: minutes, once.

        Raises:
            Unavailable: no package, no compiler, or it does not compile.
        """
        if not self.source.exists():
            self._unpack(environment)
        if not all(self.tool(name).exists() for name in _TOOLS):
            output = self.directory / "out"
            compile_tools(self.source, output, _CMAKE_OPTIONS, _TOOLS, environment, self.log)

    def _unpack(self, environment: PeerEnvironment) -> None:
        download = self.directory / "download"
        arguments = ("download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python")
        environment.pip(*arguments, "--dest", download, PACKAGE)
        (archive,) = download.glob("llama_cpp_python-*.tar.gz")
        unfinished = self.directory / "source.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        with tarfile.open(archive) as sources:
            sources.extractall(unfinished, filter="data")
        (inner,) = unfinished.iterdir()
        inner.rename(self.directory / "source")
        unfinished.rmdir()


def compile_tools(
    source: Path,
    output: Path,
    options: Sequence[str],
    tools: Sequence[str],
    environment: PeerEnvironment,
    log: Path,
) -> None:
    """Into `output`/bin, by CMake, which is installed where it is not there.

    Raises:
        Unavailable: no compiler, or it does not compile.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        environment.install(("cmake==4.4.4",))
        cmake = str(environment.python.with_name("cmake"))
    run_step([cmake, "-S", source, "-B", output, *options], log)
    jobs = str(os.cpu_count() or 1)  # make takes "as many as there are files" from no number
    run_step([cmake, "--build", output, "--parallel", jobs, "--target", *tools], log)


@dataclass(frozen=True)
class LlamaCpp:
    """A contestant. Flash attention on, weights repacked at load, as many threads as the others."""

    setting: Setting
    build: LlamaCppBuild
    dtype: str
    runtime: str = "llama.cpp"

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.dtype}"

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def model(self) -> Path:
        return self.setting.directory / "gguf" / f"{self.dtype}.gguf"

    @property
    def read_bytes(self) -> int:
        """Embeddings are tied to the lm_head in the converted model too."""
        return self.model.stat().st_size

    def decode(self, batch: int, seed: int) -> Figures:
        """By llama-batched-bench, which draws its own tokens and warms up by itself."""
        options = bench_options(self.setting, self.model, batch)
        command: Command = [self.build.tool("llama-batched-bench"), *options]
        done = run([*command, "--output-format", "jsonl"])
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        result = json.loads(line)
        return {
            "decode_tok_s": result["speed_tg"],
            "prefill_tok_s": result["speed_pp"],
            "peak_rss_bytes": done.peak_rss,
        }

    def start(self, seed: int) -> Figures:
        """Through the server without its warm-up, which is its quickest way to a first token."""
        prompt = self.setting.work.prompts(1, self.setting.work.start_len, seed)[0]
        with self._serving(1, 1024, "--no-warmup") as (client, server):
            client.complete(prompt, 1, reuse=False)
            return {"first_token_s": server.seconds_since_start()}

    def streams(self, seed: int) -> Figures:
        work = self.setting.work
        cells = work.streams * (work.prompt_len + work.stream_len)
        with self._serving(work.streams, cells) as (client, server):
            client.complete(work.warmup(), 2, reuse=False)
            traces = client.streams(
                work.prompts(work.streams, work.prompt_len, seed), work.stream_len
            )
            return stream_figures(traces, server.peak_rss())

    def chat(self, seed: int, *, reuse: bool) -> Figures:
        work = self.setting.work
        with self._serving(1, work.chat_len + work.prompt_len) as (client, _):
            client.complete(work.warmup(), 2, reuse=False)

            def complete(prompt: Sequence[int], output_len: int) -> list[int]:
                return client.complete(prompt, output_len, reuse=reuse)

            return {"chat_s": chat_seconds(complete, work.chat(seed), work.reply_len)}

    @contextmanager
    def _serving(self, slots: int, cells: int, *more: str) -> Iterator[tuple[LlamaServer, Server]]:
        client = LlamaServer(free_port())
        command: Command = [
            self.build.tool("llama-server"),
            *model_options(self.setting, self.model, cells),
            "-np",
            str(slots),
        ]
        command += ["--host", "127.0.0.1", "--port", str(client.port), *more]
        with serving(command, client.is_ready) as server:
            yield client, server


def model_options(setting: Setting, model: Path, cells: int) -> Command:
    """Of every tool: the model, so many tokens of keys and values, and threads."""
    threads = str(setting.threads)
    options: Command = ["-m", model, "-c", str(cells), "-fa", "on"]
    return [*options, "-t", threads, "-tb", threads, "-b", "2048", "-ub", "512"]


def bench_options(setting: Setting, model: Path, batch: int) -> Command:
    """Of llama-batched-bench, for `batch` sequences at once."""
    work = setting.work
    cells = batch * (work.prompt_len + work.decode_len)
    lengths: Command = ["-npp", str(work.prompt_len), "-ntg", str(work.decode_len)]
    return [*model_options(setting, model, cells), *lengths, "-npl", str(batch)]


def prepare(
    setting: Setting, environment: PeerEnvironment, build: LlamaCppBuild, dtypes: list[str]
) -> list[LlamaCpp]:
    """Compile, and convert what has not been converted yet.

    Raises:
        Unavailable: something could not be installed, compiled or converted.
    """
    environment.install(CONVERTER_REQUIREMENTS)
    build.make(environment)
    exact = LlamaCpp(setting, build, "bf16")
    if not exact.model.exists():
        _convert(exact, environment)
    contestants = [LlamaCpp(setting, build, dtype) for dtype in dtypes]
    for one in contestants:
        if not one.model.exists():
            _quantize(one, exact.model)
    return contestants


def _convert(one: LlamaCpp, environment: PeerEnvironment) -> None:
    one.model.parent.mkdir(parents=True, exist_ok=True)
    unfinished = one.model.with_suffix(".unfinished")
    script = Path(__file__).with_name("gguf_convert.py")
    command: Command = [environment.python, script, one.build.source, one.setting.checkpoint]
    command += ["--outtype", "bf16", "--outfile", unfinished]
    run_step(command, one.setting.logs / "llama_cpp.log")
    unfinished.rename(one.model)


def _quantize(one: LlamaCpp, exact: Path) -> None:
    unfinished = one.model.with_suffix(".unfinished")
    command: Command = [one.build.tool("llama-quantize"), exact, unfinished, one.dtype]
    run_step(command, one.setting.logs / "llama_cpp.log")
    unfinished.rename(one.model)


def versions(build: LlamaCppBuild) -> dict[str, str]:
    done = run([build.tool("llama-server"), "--version"])
    return {"llama-cpp-python": PACKAGE.split("==")[1], "llama.cpp": done.stdout.strip()}
