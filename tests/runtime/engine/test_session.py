"""An engine is verified before anything of it is mapped or loaded, and says what does not fit."""

import json
import os
import shutil
import threading
import typing
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.engines import build_tiny
from tests.support.models import random_prompt, tiny_checkpoint
from trtc.plugins.cpu.host import object_file, runnable_isas
from trtc.plugins.cpu.isa import ISAS
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    RequestError,
    TrtcError,
)
from trtc.protos.manifest import WEIGHTS_FILE, Manifest, TargetFacts, read_manifest
from trtc.runtime.engine import session
from trtc.runtime.engine.probe import Probe, greedy, sequence_logits
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors import cpu_opening
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.cpu import CpuExecutor
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.executors.opening import Opening, OpenRequest
from trtc.runtime.host.machine import available_bytes, num_usable_cores, usable_cores

BEST = runnable_isas()[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("session")
    checkpoint = tiny_checkpoint("llama", directory)
    isas = tuple(dict.fromkeys((BEST, "generic")))
    build_tiny(checkpoint, directory / "engine", isas=isas)
    return directory / "engine"


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def reseal(engine: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Alter the manifest as someone with bad intentions and the source code would."""
    (engine / "manifest.json").write_bytes(change(read_manifest(engine)).sealed().to_json())


def set_fields(part: str, **fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: msgspec.structs.replace(
        manifest, **{part: msgspec.structs.replace(getattr(manifest, part), **fields)}
    )


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("code was loaded before the engine was verified")

    monkeypatch.setattr(cpu_opening, "CpuExecutor", loaded)
    monkeypatch.setattr(cpu_opening, "map_weights", loaded)


def test_a_whole_engine_opens_and_answers(built: Path) -> None:
    opened = open_session(built, num_threads=1, num_pages=32)
    assert opened.tokenizer is None and opened.executor.num_pages == 32
    assert len(greedy(opened.executor, random_prompt(9), 5)) == 5
    opened.close()
    opened.close()


@pytest.mark.parametrize(
    "name", ["weights.safetensors", object_file(BEST), "plan.json", "graph.onnx"]
)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_flipped_bit_anywhere_is_found(
    engine: Path, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_loading(monkeypatch)
    size = (engine / name).stat().st_size
    flip_bit(engine / name, {"first": 0, "middle": size // 2, "last": -1}[place])
    with pytest.raises(EngineCorruptError, match="sha256") as caught:
        open_session(engine, num_pages=8)
    assert caught.value.field == str(engine / name)


@pytest.mark.parametrize("name", ["weights.safetensors", object_file(BEST), "plan.json"])
def test_of_a_damaged_engine_only_weights_may_be_loaded_before_it_shows(
    engine: Path, name: str
) -> None:
    flip_bit(engine / name, -1)
    if name != "weights.safetensors":
        with pytest.raises(EngineCorruptError, match="sha256"):
            open_session(engine, num_pages=8, quick_start=True)
        return
    with closing(open_session(engine, num_pages=8, quick_start=True)) as opened:
        assert opened.late_check is not None
        with pytest.raises(EngineCorruptError, match="sha256") as caught:
            opened.late_check.wait()
    assert caught.value.field == str(engine / name)


def test_files_are_hashed_while_the_machine_is_looked_at(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = threading.Event()

    def compare(engine: Path, chunk: object) -> None:
        hashed.set()

    def prepare(request: OpenRequest) -> Opening:
        assert hashed.wait(10)
        raise EnvironmentFault("no such machine")

    monkeypatch.setattr("trtc.runtime.integrity.verify._compare", compare)
    monkeypatch.setattr(session, "KINDS", {"cpu": prepare})
    with pytest.raises(EnvironmentFault, match="no such machine"):
        open_session(built, num_pages=8)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("trtc-verify") for name in names)


@pytest.mark.parametrize("position", [0.01, 0.3, 0.6, 0.95])
def test_an_altered_manifest_is_found(engine: Path, position: float) -> None:
    content = bytearray((engine / "manifest.json").read_bytes())
    digit = next(
        i
        for i in range(int(position * len(content)), len(content))
        if content[i] in b"0123456789abcdef"
    )
    content[digit] = ord("7") if content[digit] != ord("7") else ord("8")
    (engine / "manifest.json").write_bytes(content)
    with pytest.raises((EngineCorruptError, EngineIncompatibleError), match=r"manifest\.json"):
        open_session(engine, num_pages=8)


def test_missing_truncated_and_longer_files(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_loading(monkeypatch)
    path = engine / "weights.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"x", b""):
        path.write_bytes(content)
        with pytest.raises(EngineCorruptError, match=f"has {len(content)} bytes"):
            open_session(engine, num_pages=8, verify=False)
    path.unlink()
    with pytest.raises(EngineCorruptError, match="No such file"):
        open_session(engine, num_pages=8)


def test_not_an_engine_at_all(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EngineCorruptError, match=r"trtc build"):
            open_session(path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (set_fields("target", archs=("x86-64-v9",)), EngineIncompatibleError, r"target\.archs"),
        (
            lambda m: msgspec.structs.replace(m, dummy_weights=True),
            EngineIncompatibleError,
            "--dummy-weights",
        ),
        (
            lambda m: msgspec.structs.replace(
                m, files={k: v for k, v in m.files.items() if k != "plan.json"}
            ),
            EngineCorruptError,
            r"plan\.json: is not listed",
        ),
        (
            lambda m: msgspec.structs.replace(
                m, files={**m.files, "../secret": m.files["plan.json"]}
            ),
            EngineCorruptError,
            "leads out of the engine",
        ),
        (set_fields("ledger", weights=64), EngineCorruptError, r"ledger\.weights"),
        (
            lambda m: msgspec.structs.replace(m, schema_version=99),
            EngineIncompatibleError,
            "schema_version",
        ),
        (
            lambda m: msgspec.structs.replace(m, step_abi_version=99),
            EngineIncompatibleError,
            "step_abi_version",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    engine: Path, change: Callable[[Manifest], Manifest], error: type[TrtcError], message: str
) -> None:
    reseal(engine, change)
    with pytest.raises(error, match=message):
        open_session(engine, num_pages=8)


def test_every_kind_of_engine_can_be_opened() -> None:
    """A manifest names no other: it would not decode."""
    kinds = typing.get_args(typing.get_type_hints(TargetFacts)["kind"])
    assert set(session.KINDS) == set(kinds)


def test_code_of_another_plan_is_refused(engine: Path) -> None:
    """Hashes that match do not help when the plan is not the one that was compiled."""
    plan = json.loads((engine / "plan.json").read_text())
    plan["arena_bytes"] += 64
    (engine / "plan.json").write_text(json.dumps(plan))
    from trtc.quant.hashing import file_facts

    facts = file_facts(engine / "plan.json")
    reseal(engine, lambda m: msgspec.structs.replace(m, files={**m.files, "plan.json": facts}))
    with pytest.raises(EngineIncompatibleError, match="plan_digest"):
        open_session(engine, num_pages=8)


def level_of(executor: Executor) -> str:
    assert isinstance(executor, CpuExecutor)
    level: bytes = executor._library.trtc_engine_info().contents.isa
    return level.decode()


def test_the_best_level_that_the_machine_runs_is_chosen(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both levels answer alike; without the flags only the portable one is opened."""
    prompt = np.array(random_prompt(20), np.int32)
    best = open_session(built, num_threads=1, num_pages=32)
    monkeypatch.setattr(cpu_opening, "runnable_isas", lambda: ("generic",))
    portable = open_session(built, num_threads=1, num_pages=32)
    first, second = (
        np.concatenate(list(sequence_logits(opened.executor, prompt)))
        for opened in (best, portable)
    )
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-4)
    assert level_of(best.executor) == BEST
    assert level_of(portable.executor) == "generic"


def test_an_engine_without_a_level_for_this_machine(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_loading(monkeypatch)
    monkeypatch.setattr(cpu_opening, "runnable_isas", lambda: ("sve2",))
    with pytest.raises(EngineIncompatibleError, match=r"this machine runs sve2.*cpu:sve2"):
        open_session(built, num_pages=8)


def test_a_processor_without_what_the_code_needs_is_told_what(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_loading(monkeypatch)
    reseal(engine, set_fields("target", archs=("x86-64-v4",)))
    flags = ISAS["x86-64-v4"].cpu_flags - {"avx512_vnni", "avx512_bf16"}
    monkeypatch.setattr(cpu_opening, "runnable_isas", lambda: runnable_isas("x86_64", flags))
    monkeypatch.setattr(cpu_opening, "read_cpu_flags", lambda: flags)
    expected = r"lacks avx512_bf16, avx512_vnni.*--target cpu:x86-64-v3"
    with pytest.raises(EngineIncompatibleError, match=expected):
        open_session(engine, num_pages=8)


# --- Threads ----------------------------------------------------------------------------------


def test_more_threads_than_cpus_are_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the affinity mask count, as taskset leaves them."""
    allowed = os.sched_getaffinity(0)
    with pytest.raises(RequestError, match=rf"--threads.*may run on {len(allowed)} CPUs"):
        open_session(built, num_threads=len(allowed) + 1, num_pages=8)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {min(allowed)})
    with pytest.raises(RequestError, match=r"may run on 1 CPUs.*at most 1"):
        open_session(built, num_threads=2, num_pages=8)


@pytest.mark.parametrize(("threads", "pinned"), [(None, (0, 2)), (2, (0, 2)), (1, ()), (3, ())])
def test_threads_on_every_core_are_pinned_one_to_each(
    built: Path,
    threads: int | None,
    pinned: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cpu_opening, "usable_cores", lambda: (0, 2))
    monkeypatch.setattr(cpu_opening, "num_usable_cores", lambda: 2)
    monkeypatch.setattr(cpu_opening, "CpuExecutor", lambda files, **options: given.update(options))
    with suppress(AttributeError):
        open_session(built, num_threads=threads, num_pages=8)
    assert given["cpus"] == pinned and given["num_threads"] == (threads or 2)


# --- Pool size --------------------------------------------------------------------------------


def test_pool_sizes(built: Path) -> None:
    manifest = read_manifest(built)
    page = manifest.kv.page_bytes
    sizes: tuple[tuple[dict[str, Any], int], ...] = (
        ({"kv_bytes": 10 * page + page // 2}, 10),
        ({"num_pages": 7}, 7),
        ({}, 4 * 128 // 8),
    )
    for options, pages in sizes:
        opened = open_session(built, num_threads=1, **options)
        assert opened.executor.num_pages == pages
        opened.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_bytes": 10}, RequestError, "holds no page"),
        ({"num_pages": 0}, RequestError, "--kv-bytes"),
        ({"kv_bytes": 1 << 20, "num_pages": 1}, RequestError, "either"),
        ({"kv_bytes": 1 << 60}, EnvironmentFault, "does not fit"),
        ({"num_pages": 4, "num_threads": 0}, RequestError, "--threads"),
        ({"num_pages": 4, "dummy_weights": True}, RequestError, "weights of its own"),
    ],
)
def test_impossible_options(
    built: Path, options: dict[str, Any], error: type[TrtcError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_session(built, **options)


def test_the_default_pool_is_half_of_what_is_free(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(built)
    free = manifest.ledger.activations + 20 * manifest.kv.page_bytes
    monkeypatch.setattr(cpu_opening, "available_bytes", lambda: free)
    opened = open_session(built, num_threads=1)
    assert opened.executor.num_pages == 10
    monkeypatch.setattr(cpu_opening, "available_bytes", lambda: 0)
    with pytest.raises(EnvironmentFault, match="too little for a KV pool"):
        open_session(built, num_threads=1)


class Prepared:
    """An opening that remembers what became of it."""

    files = ("plan.json",)
    pool_share = 0.5
    max_pages = None

    def __init__(self) -> None:
        self.events: list[str] = []

    def free_bytes(self) -> int:
        return 1 << 30

    def close(self) -> None:
        self.events.append("let go")

    def open(self, num_pages: int) -> EchoExecutor:
        self.executor = EchoExecutor(EchoOptions())
        return self.executor


@pytest.mark.parametrize(
    ("fault", "message"),
    [("pool", "--kv-bytes"), ("file", r"plan\.json"), ("tokenizer", r"tokenizer\.json")],
)
def test_what_an_opening_began_is_undone_when_it_fails(
    engine: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks' processes, for one, would wait for ever."""
    prepared = Prepared()
    monkeypatch.setattr("trtc.runtime.engine.session.KINDS", {"cpu": lambda request: prepared})
    if fault == "file":
        flip_bit(engine / "plan.json", 0)
    if fault == "tokenizer":
        reseal(engine, lambda m: msgspec.structs.replace(m, has_tokenizer=True))
    with pytest.raises(TrtcError, match=message):
        open_session(engine, num_pages=0 if fault == "pool" else 8)
    assert prepared.events == ["let go"]
    assert fault != "tokenizer" or prepared.executor.closed


# --- Weights that stay on the host -------------------------------------------------------------


def test_weights_of_a_closed_session_open_the_next_one(engine: Path) -> None:
    first = open_session(engine, num_pages=8)
    kept = first.keep_weights()
    first.close()
    assert kept.digest == first.manifest.digest
    assert kept.mapped is not None
    again = open_session(engine, num_pages=8, weights=kept)
    assert again.keep_weights().data is kept.data
    again.close()


@pytest.mark.parametrize("change", ["digest", "file", "content"])
def test_weights_of_another_engine_or_of_a_file_that_was_written_to_are_not_used(
    change: str, engine: Path
) -> None:
    first = open_session(engine, num_pages=8)
    kept = first.keep_weights()
    first.close()
    weights = engine / WEIGHTS_FILE
    if change == "digest":
        kept = kept._replace(digest="0" * 64)
    if change == "file":
        content = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(content)
    if change == "content":
        flip_bit(weights, -1)
        with pytest.raises(EngineCorruptError, match="differs from the manifest's sha256"):
            open_session(engine, num_pages=8, weights=kept)
        return
    again = open_session(engine, num_pages=8, weights=kept)
    assert again.keep_weights().data is not kept.data
    again.close()


def test_a_copy_of_weights_is_used_whatever_has_become_of_the_file(engine: Path) -> None:
    first = open_session(engine, num_pages=8)
    kept = first.keep_weights()
    room = np.empty(len(kept.data) + 64, np.uint8)
    data = room[-room.ctypes.data % 64 :][: len(kept.data)]  # kernels want this alignment
    data[:] = kept.data
    copy = kept._replace(data=data, mapped=None)
    first.close()
    flip_bit(engine / WEIGHTS_FILE, -1)
    again = open_session(engine, num_pages=8, weights=copy)
    assert again.keep_weights().data is copy.data
    again.close()


# --- The machine ------------------------------------------------------------------------------


def test_memory_is_bounded_by_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert available_bytes(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("30000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert available_bytes(meminfo, tmp_path) == 20000
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 5000\nactive_file 100\n")
    assert available_bytes(meminfo, tmp_path) == 25100
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 50 * 1024
    assert available_bytes() > 0


def test_cores_are_counted_once_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0,2" if cpu % 2 == 0 else "1,3")
    assert num_usable_cores(tmp_path, tmp_path) == 2
    assert usable_cores(tmp_path) == (0, 1)
    assert usable_cores(tmp_path / "none") == (0, 1, 2, 3)
    assert num_usable_cores(tmp_path / "none", tmp_path) == 4
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert num_usable_cores(tmp_path, tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_usable_cores(tmp_path, tmp_path) == 2


# --- The probe --------------------------------------------------------------------------------


def test_the_probe_refuses_what_the_engine_cannot_hold(built: Path) -> None:
    for length in (0, 129):
        with pytest.raises(RequestError, match="1 to 128"):
            next(Probe(1).logits(built, [np.zeros(length, np.int32)]))


def test_the_probe_stops_at_the_end_of_the_context(built: Path) -> None:
    assert len(Probe(1).greedy(built, random_prompt(120), 50)) == 9
