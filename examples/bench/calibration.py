"""The memory and time that calibration takes of a large checkpoint: random weights of a published
shape.

    python -m examples.bench.calibration DIR [--dtype fp8] [--shape llama-70b] [--layers N]
        [--device-gb 24] [--max-bits 4.8]

Makes the checkpoint unless a run before has, and quantises it to `--dtype` on a GPU if there is
one, decoder layer after decoder layer, on the calibration text that ships with trtc, in the
tokenizer of a bundled model. Layers that are done are kept in DIR: a run that was killed is begun
again by the same command, and goes on where it was. With `--max-bits`, a recipe is searched for
instead, as `trtc build` does, and what recipes diverge by is printed. Prints each step with its
time and the GPU's peak so far, and at the end the seconds of a layer and the peaks of the process's
own memory, without the mapped files of the checkpoint and pinned memory, of pinned memory, and of
torch's on the GPU, of which it gets no more than `--device-gb`.
"""

import argparse
import json
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.bench.gpu_shapes import LLAMA_8B, LLAMA_70B
from examples.bench.peers.checkpoint import SMALL, TOKENIZER_MODEL, random_weight, unfinished
from trtc.protos.progress import Step
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.calibration_text import TOKENIZER_FILE
from trtc.quant.checkpoint_files import INDEX
from trtc.quant.checkpoint_search import recipe_search
from trtc.quant.reference_model import empty_model, load_config
from trtc.quant.scheme import BUILDABLE, SCHEMES, Gptq, Modelopt
from trtc.quant.site_format import EMBEDDING, TABLES
from trtc.runtime.host.machine import resident_bytes

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-70b": LLAMA_70B,
    "llama-8b": LLAMA_8B,
    "small": SMALL.config(),
}
CALIBRATED = tuple(
    name for name in BUILDABLE if isinstance(SCHEMES[name].calibration, Gptq | Modelopt)
)
_SAMPLE_S = 0.05
_FILES_AT_ONCE = 4
"""That are written. One is a decoder layer, of 1.7 GB in the 70B shape."""


@dataclass
class Peak:
    """The largest number of bytes that were seen."""

    num_bytes: int = 0


@dataclass
class StageTimes:
    """When the layers of a phase, or what else it counts, were begun, by how many were done; the
    last is the end of all."""

    report: Callable[[str], None]
    begun: dict[str, dict[int, float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def __call__(self, step: Step) -> None:
        self.report(step)
        if step.done is not None:
            self.units[step.phase] = step.unit
            self.begun.setdefault(step.phase, {})[step.done] = time.perf_counter()

    @property
    def seconds(self) -> Mapping[str, tuple[float, ...]]:
        """Of each layer that was computed, in order, by phase."""
        return {
            phase: tuple(
                begun[done + 1] - begin
                for done, begin in sorted(begun.items())
                if done + 1 in begun
            )
            for phase, begun in self.begun.items()
        }


@contextmanager
def host_peak() -> Iterator[Peak]:
    """The largest `resident_bytes` of this process within the block."""
    peak, ended = Peak(), threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            peak.num_bytes = max(peak.num_bytes, resident_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def make_checkpoint(directory: Path, config: Mapping[str, Any]) -> None:
    """Write random bf16 weights, a file a decoder layer; all of it or nothing."""
    with unfinished(directory) as place:
        (place / "config.json").write_text(json.dumps(config))
        shutil.copy(TOKENIZER_MODEL / TOKENIZER_FILE, place)
        files: dict[str, dict[str, torch.Size]] = defaultdict(dict)
        for name, tensor in empty_model(load_config(place)).named_parameters():
            rest = name.partition("layers.")[2]
            part = rest.partition(".")[0] or "others"
            files[f"model-{part}.safetensors"][name] = tensor.shape
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            written = [
                pool.submit(_write_weights, place / file, shapes, seed)
                for seed, (file, shapes) in enumerate(files.items())
            ]
            for one in written:
                one.result()
        weight_map = {name: file for file, shapes in files.items() for name in shapes}
        total = sum(path.stat().st_size for path in place.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (place / INDEX).write_text(json.dumps(index))


def _write_weights(file: Path, shapes: Mapping[str, torch.Size], seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weights = {name: random_weight(name, size, generator) for name, size in shapes.items()}
    save_file(weights, file, {"format": "pt"})


def limit_device(num_bytes: float) -> None:
    """Let torch have no more of the first GPU, if there is one."""
    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info(0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), 0)


def gpu_peak_gb() -> float:
    """The most that torch has had of the first GPU; 0.0 without one."""
    return torch.cuda.max_memory_reserved(0) / 1e9 if torch.cuda.is_available() else 0.0


def table(times: StageTimes, total_s: float, host: Peak) -> str:
    """The run's figures."""
    device, pinned = "CPU", 0
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    phases = [
        f"{phase}: {len(items)} {times.units[phase]} of {max(times.begun[phase])} in "
        f"{sum(items):.1f} s, median {statistics.median(items):.2f} s"
        for phase, items in times.seconds.items()
        if items
    ]
    peaks = (
        f"{device}: {total_s:.0f} s in all; peaks: own memory {host.num_bytes / 1e9:.2f} GB, "
        f"pinned {pinned / 1e9:.2f} GB, GPU {gpu_peak_gb():.2f} GB"
    )
    return "\n".join((*phases, peaks))


def search(
    checkpoint: Path, max_bits: float, config: Mapping[str, Any], journal: Path, times: StageTimes
) -> str:
    """Find a recipe, and say what others cost beside it."""
    tables = (EMBEDDING,) if config["tie_word_embeddings"] else TABLES
    with recipe_search(checkpoint, None, None, times, tables, journal) as found:
        chosen = found.within_bits(max_bits)
        return "\n".join(
            f"{point.bits:7.3f} bits  KL {kl.mean:.4f} +- {kl.error:.4f}"
            f"{'  <- found' if point == chosen else ''}"
            for point, kl in found.frontier(chosen)
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-70b")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--dtype", choices=CALIBRATED, default="int4")
    parser.add_argument("--checkpoint", type=Path, help="default: DIR/checkpoint")
    parser.add_argument("--max-bits", type=float, help="find a recipe of so many bits a weight")
    parser.add_argument("--device-gb", type=float, default=24.0)
    given = parser.parse_args(arguments)
    config = dict(SHAPES[given.shape])
    config["num_hidden_layers"] = given.layers or config["num_hidden_layers"]
    checkpoint: Path = given.checkpoint or given.directory / "checkpoint"
    if not checkpoint.is_dir():
        begin = time.perf_counter()
        make_checkpoint(checkpoint, config)
        print(f"made the checkpoint in {time.perf_counter() - begin:.0f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    limit_device(given.device_gb * 1e9)
    begin = time.perf_counter()

    def report(line: str) -> None:
        passed = time.perf_counter() - begin
        print(f"{passed:7.1f} s  GPU {gpu_peak_gb():5.2f} GB  {line}", flush=True)

    times = StageTimes(report)
    journal = given.directory / "journal"
    with host_peak() as host:
        if given.max_bits is not None:
            print(search(checkpoint, given.max_bits, config, journal, times), flush=True)
        else:
            output, scheme = given.directory / given.dtype, SCHEMES[given.dtype]
            quantize_checkpoint(checkpoint, scheme, "bf16", None, output, times, journal=journal)
    print(table(times, time.perf_counter() - begin, host))


if __name__ == "__main__":
    main()
