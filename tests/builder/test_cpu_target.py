"""From a plan to C++ and shared objects, on machines with and without a compiler."""

import ctypes
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_plan import plan_of
from trtc.builder.targets.cpu import CpuTarget, parse_cpu_target
from trtc.builder.targets.cpu_codegen import generate
from trtc.builder.targets.cxx import Compiler, find_compiler
from trtc.builder.targets.processes import Children
from trtc.builder.targets.registry import parse_target
from trtc.plugins.cpu.host import read_cpu_flags, runnable_isas
from trtc.plugins.cpu.isa import ISAS
from trtc.plugins.registry import REGISTRY
from trtc.protos.errors import EnvironmentFault, InvariantError, OutputError, UnsupportedError
from trtc.quant.scheme import SCHEMES

BASELINE = frozenset({"fpu", "sse2"})


def source_of(**overrides: Any) -> str:
    return generate(plan_of("llama", **overrides), "d" * 64, REGISTRY)


def test_code_does_not_grow_with_depth() -> None:
    """Layers share kernel instances: only the tables are longer."""

    def kernels(source: str) -> int:
        return source.count("\nstruct C")

    shallow, deep = source_of(num_hidden_layers=2), source_of(num_hidden_layers=12)
    assert kernels(shallow) == kernels(deep)
    assert deep.count("{call_") > shallow.count("{call_")


def test_source_is_repeatable_and_names_every_site() -> None:
    source = source_of()
    assert source == source_of()
    assert "// layers.1.mlp.down" in source and "/work" not in source


def test_absent_optionals_leave_their_slot_empty() -> None:
    """Argument tables carry the slot, so that a kernel's views stay in declared order."""
    source = source_of()
    slots = [p.name for p in REGISTRY["linear"].parameters]
    assert f"{{{slots.index('residual')}, Kind::kBuffer" in source


# --- Which levels -----------------------------------------------------------------------------


def test_levels_by_cpu_flags() -> None:
    v3 = BASELINE | ISAS["x86-64-v3"].cpu_flags
    v4 = v3 | ISAS["x86-64-v4"].cpu_flags
    assert runnable_isas("x86_64", v4) == ("x86-64-v4", "x86-64-v3", "generic")
    assert runnable_isas("x86_64", v3) == ("x86-64-v3", "generic")
    assert runnable_isas("x86_64", v4 - {"avx512_bf16"}) == ("x86-64-v3", "generic")
    assert runnable_isas("x86_64", BASELINE) == ("generic",)
    assert runnable_isas("aarch64", v4) == ("generic",)


def test_cpu_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 fma\nbugs : x\n")
    assert read_cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    assert read_cpu_flags(tmp_path / "absent") == frozenset()


def test_target_names() -> None:
    assert parse_target("cpu:generic").name == "cpu:generic"
    assert parse_target("cpu:generic, x86-64-v3").name == "cpu:x86-64-v3,generic"
    assert parse_target("cpu").name == f"cpu:{runnable_isas()[0]}"
    assert parse_target(None).name == parse_target("cpu").name


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_120"])
def test_fp4_is_refused_by_targets_without_it(target: str) -> None:
    with pytest.raises(UnsupportedError, match=r"no FP4 arithmetic.*tensorrt-rtx:sm_120"):
        parse_target(target).check(SCHEMES["nvfp4"])


@pytest.mark.parametrize("name", ["cpu:avx9", "cpu:generic,", "tpu", "cuda", "cuda:sm_75"])
def test_unknown_targets_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="--target"):
        parse_target(name)


def test_a_target_knows_what_runs_here() -> None:
    assert parse_cpu_target("generic").runs_here
    assert not CpuTarget(isas=("another",)).runs_here


# --- The compiler -----------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match=r"no C\+\+ compiler.*apt-get install g\+\+"):
        parse_target("cpu").check(SCHEMES["fp32"])


def test_a_wrong_cxx_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(EnvironmentFault, match=r"CXX=/nowhere/c\+\+ does not run"):
        find_compiler()


def test_cxx_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env c++")
    assert find_compiler().command == ("env", "c++")
    parse_target("cpu").check(SCHEMES["fp32"])


def test_an_old_compiler_is_refused_before_any_work(tmp_path: Path) -> None:
    old = script(tmp_path / "g++", "echo 'error: unrecognized option -std=c++20' >&2; exit 1")
    with pytest.raises(EnvironmentFault, match=r"g\+\+ 4 cannot compile C\+\+20 for generic: err"):
        Compiler((str(old),), "g++ 4").check("generic")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("echo 'as: No space left on device' >&2; exit 1", OutputError, "disk is full"),
        ("echo 'g++: fatal error: Killed signal' >&2; exit 1", EnvironmentFault, "memory"),
        ("kill -9 $$", EnvironmentFault, "memory"),
        ("echo 'a.cpp:1: error: no such kernel' >&2; exit 1", InvariantError, "no such kernel"),
    ],
)
def test_a_compiler_that_fails(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    compiler = Compiler((str(script(tmp_path / "g++", text)),), "g++ 99")
    source = tmp_path / "a.cpp"
    source.write_text("")
    with pytest.raises(error, match=message), Children() as children:
        compiler.build(source, "generic", tmp_path, tmp_path / "a.so", "-O1", children)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cpp", "g++"]


def test_objects_hold_no_path_and_need_no_cpp_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled twice in two directories: the same bytes, and nothing of libstdc++ to find."""
    monkeypatch.delenv("CXX")
    compiler = find_compiler()
    text = """#include <stdexcept>
    extern "C" __attribute__((visibility("default"))) const char* f() {
      try { throw std::runtime_error("x"); } catch (std::exception& e) { return __FILE__; }
    }
    """
    objects = []
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "engine.cpp").write_text(text)
        output = directory / "engine.so"
        with Children() as children:
            compiler.build(directory / "engine.cpp", "generic", tmp_path, output, "-O1", children)
        assert sorted(path.name for path in directory.iterdir()) == ["engine.cpp", "engine.so"]
        objects.append((directory / "engine.so").read_bytes())
    assert objects[0] == objects[1]
    assert str(tmp_path).encode() not in objects[0]
    assert b"libstdc++.so" not in objects[0]
    library = ctypes.CDLL(str(tmp_path / "one" / "engine.so"))
    library.f.restype = ctypes.c_char_p
    assert library.f() == b"engine.cpp"
