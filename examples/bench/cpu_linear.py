"""Time the CPU linear kernels beside torch's bf16 linear, in one run on one machine.

    python -m examples.bench.cpu_linear --threads 2
    python -m examples.bench.cpu_linear --shapes 2048x16384 --rows 1,512 --kinds i4,bf16

For every shape (in x out features) and number of rows: the best time of many calls, the weight
bytes read a second and the operations a second. Weights take turns among copies that together
exceed the caches, as the layers of a model do.
"""

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import trtc.plugins
from trtc.plugins.cpu.emit import config_struct
from trtc.plugins.cpu.host import runnable_isas
from trtc.plugins.cpu.isa import CXX_FLAGS, ISAS
from trtc.plugins.layouts import packed_bytes
from trtc.plugins.linear.op import LINEAR
from trtc.plugins.rounding import NUMPY_DTYPES, cast

PLUGINS = Path(trtc.plugins.__file__).resolve().parent
Array = NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """A kind of linear, as a scheme makes it."""

    x: str
    weight: str
    group: int = 0
    activation: str = "exact"

    @property
    def scale(self) -> str:
        """Element type of the scales."""
        return "u8" if self.weight in ("iq4", "f4e2m1") else "f32"

    @property
    def has_unit(self) -> bool:
        """Whether scales are bytes in the unit of a row."""
        return self.weight == "iq4" or (self.weight, self.group) == ("f4e2m1", 16)


KINDS = {
    "bf16": Kind("bf16", "bf16"),
    "fp8": Kind("f8e4m3", "f8e4m3"),
    "i8": Kind("i8", "i8"),
    "i8_g128": Kind("bf16", "i8", 128, "dynamic_i8"),
    "i8_g32": Kind("bf16", "i8", 32, "dynamic_i8"),
    "i8_g16": Kind("bf16", "i8", 16, "dynamic_i8"),
    "i6": Kind("bf16", "i6", 128, "dynamic_i8"),
    "i4": Kind("bf16", "i4", 128, "dynamic_i8"),
    "i4_g32": Kind("bf16", "i4", 32, "dynamic_i8"),
    "iq4": Kind("bf16", "iq4", 32, "dynamic_i8"),
    "iq4_g16": Kind("bf16", "iq4", 16, "dynamic_i8"),
    "mxfp4": Kind("bf16", "f4e2m1", 32, "dynamic_i8"),
    "nvfp4": Kind("bf16", "f4e2m1", 16, "dynamic_i8"),
    "i4_exact": Kind("bf16", "i4", 128),
}
_SLOTS = {parameter.name: slot for slot, parameter in enumerate(LINEAR.parameters)}
COLD_BYTES = 96 << 20
"""Copies of a weight add up to this, more than a last-level cache holds."""


class Views(ctypes.Structure):
    """linear_args of plugins/linear/cpu.hpp: (pointer, row stride) pairs, then the rows."""

    _fields_ = (("fields", ctypes.c_int64 * (2 * len(LINEAR.parameters))), ("rows", ctypes.c_int64))


def compile_linear(kind: Kind, depth: int, columns: int, work: Path) -> ctypes.CDLL:
    """One kernel as a shared object, as an engine would hold it."""
    types = {"x": kind.x, "weight": "u8", "out": "bf16"}
    if kind.weight != "bf16":
        types["weight_scale"] = kind.scale
    if kind.has_unit:
        types["scale_unit"] = "f32"
    config = config_struct(
        "C",
        LINEAR,
        axes={"K": depth, "N": columns},
        attributes={
            "N": columns,
            "group_size": kind.group,
            "weight_dtype": kind.weight,
            "layout": "packed",
            "activation": kind.activation,
            "out_dtype": "bf16",
        },
        dtypes=types,
    )
    source = work / "linear.cpp"
    source.write_text(
        f"""#include "linear/cpu.hpp"
{config}
extern "C" void* create(int n) {{ return new trtc::ThreadPool(n); }}
extern "C" void destroy(trtc::ThreadPool* pool) {{ delete pool; }}
extern "C" std::size_t scratch(std::int64_t rows, int n) {{
  return trtc::linear_scratch<C>(rows, n);
}}
extern "C" void run(trtc::ThreadPool* pool, std::byte* scratch, const trtc::linear_args* args) {{
  trtc::Context context{{*pool, scratch, 0}};
  trtc::linear<C>(context, *args);
}}
"""
    )
    library = work / f"{kind.x}-{kind.weight}-{kind.group}-{kind.activation}-{depth}x{columns}.so"
    compiler = shutil.which("g++") or "c++"
    isa = ISAS[runnable_isas()[0]]
    flags = (*CXX_FLAGS, *isa.compiler_flags, "-O3", f"-I{PLUGINS}")
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.create.restype = ctypes.c_void_p
    loaded.scratch.restype = ctypes.c_size_t
    return loaded


def aligned(count: int) -> Array:
    memory = np.zeros(count + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + count]


def best_seconds(call: Callable[[int], None], budget: float) -> float:
    """The fastest of at least three calls, repeated for `budget` seconds."""
    times: list[float] = []
    stop = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < stop:
        begin = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - begin)
    return min(times)


def time_kernel(kind: Kind, shape: tuple[int, int], rows: int, threads: int, library: Any) -> float:
    """Seconds a call. Random bytes are weights as good as any for a clock."""
    depth, columns = shape
    rng = np.random.default_rng(0)
    size = packed_bytes(columns, depth, kind.weight)
    copies = [aligned(size) for _ in range(-(-COLD_BYTES // size))]
    for copy in copies:
        copy[:] = np.resize(rng.integers(0x20, 0x3E, 1 << 20, np.uint8), size)
    x = cast(rng.standard_normal((rows, depth)).astype(np.float32), kind.x)
    groups = -(-depth // kind.group) if kind.group else 1
    one = 56 if kind.scale == "u8" else 0.01
    scales = [np.full((columns, groups), one, NUMPY_DTYPES[kind.scale]) for _ in copies]
    unit = np.full((1, columns), 0.01, np.float32)
    out = np.zeros((rows, columns), NUMPY_DTYPES["bf16"])
    scratch = aligned(library.scratch(ctypes.c_int64(rows), ctypes.c_int(threads)))
    args = Views(rows=rows)
    for name, array in (("x", x), ("scale_unit", unit), ("out", out)):
        slot = _SLOTS[name]
        args.fields[2 * slot], args.fields[2 * slot + 1] = array.ctypes.data, array.shape[1]
    pool = ctypes.c_void_p(library.create(ctypes.c_int(threads)))
    area = ctypes.c_void_p(scratch.ctypes.data)

    def call(turn: int) -> None:
        args.fields[2 * _SLOTS["weight"]] = copies[turn % len(copies)].ctypes.data
        if kind.weight != "bf16":
            at = 2 * _SLOTS["weight_scale"]
            args.fields[at] = scales[turn % len(copies)].ctypes.data
            args.fields[at + 1] = groups
        library.run(pool, area, ctypes.byref(args))

    try:
        return best_seconds(call, 0.4)
    finally:
        library.destroy(pool)


def time_torch(shape: tuple[int, int], rows: int, threads: int) -> float:
    """Seconds a call of torch's own bf16 linear."""
    torch.set_num_threads(threads)
    depth, columns = shape
    copies = [
        torch.randn(columns, depth).bfloat16()
        for _ in range(max(2, -(-COLD_BYTES // (2 * depth * columns))))
    ]
    x = torch.randn(rows, depth).bfloat16()

    def call(turn: int) -> None:
        torch.nn.functional.linear(x, copies[turn % len(copies)])

    with torch.inference_mode():
        return best_seconds(call, 0.4)


def report(name: str, shape: tuple[int, int], rows: int, size: int, seconds: float) -> str:
    depth, columns = shape
    rate = (
        f"{size / seconds / 1e9:6.1f} GB/s {2 * rows * depth * columns / seconds / 1e12:7.3f} TOP/s"
    )
    return f"{depth:>5}x{columns:<6} M={rows:<4} {name:<12} {seconds * 1e3:9.3f} ms {rate}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="2048x16384,8192x2048", help="in x out features")
    parser.add_argument("--rows", default="1,4,16,512")
    parser.add_argument("--kinds", default="bf16,fp8,i8,i4", help=", ".join(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    print(f"isa {runnable_isas()[0]}, {options.threads} threads")
    with tempfile.TemporaryDirectory() as work:
        for text in options.shapes.split(","):
            depth, columns = (int(side) for side in text.split("x"))
            shape = depth, columns
            kinds = [KINDS[name] for name in options.kinds.split(",")]
            libraries = [compile_linear(kind, depth, columns, Path(work)) for kind in kinds]
            for rows in (int(rows) for rows in options.rows.split(",")):
                seconds = time_torch(shape, rows, options.threads)
                print(report("torch bf16", shape, rows, 2 * depth * columns, seconds))
                for name, kind, library in zip(
                    options.kinds.split(","), kinds, libraries, strict=True
                ):
                    own = time_kernel(kind, shape, rows, options.threads, library)
                    size = packed_bytes(columns, depth, kind.weight)
                    print(report(name, shape, rows, size, own) + f"  {seconds / own:5.2f}x torch")


if __name__ == "__main__":
    main()
