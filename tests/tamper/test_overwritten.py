"""Weights that change under a running engine end in one clear error, not in wrong tokens."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import Serving
from tests.support.staging_gpu import StagingGpu
from trtc import open_engine
from trtc.protos.errors import EngineCorruptError, TrtcError
from trtc.protos.manifest import WEIGHTS_FILE, read_manifest
from trtc.runtime.client import Client
from trtc.runtime.executors.cuda.gpu_transfers import EventWaiter, GpuTransfers
from trtc.runtime.executors.weights import WeightsFile, map_weights
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.integrity.engine_files import FileIdentity, find_files
from trtc.runtime.integrity.verify import HashCheck

PROMPT = (5, 17, 9)


def opened(engine: Path) -> LocalEngine:
    return open_engine(engine, num_threads=1, kv_bytes=1 << 22)


def overwrite(path: Path) -> None:
    """In place, as `cp` and `rsync --inplace` do."""
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def test_weights_overwritten_between_requests_are_noticed(engine: Path) -> None:
    with closing(opened(engine)) as local:
        local.generate(PROMPT, max_tokens=2).result()
        overwrite(engine / WEIGHTS_FILE)
        for _ in range(2):
            with pytest.raises(EngineCorruptError, match="written to while") as caught:
                local.generate(PROMPT, max_tokens=2)
            assert caught.value.field == str(engine / WEIGHTS_FILE)


def test_weights_overwritten_during_a_request_keep_it_from_ending_well(engine: Path) -> None:
    with closing(opened(engine)) as local:
        local.generate(PROMPT, max_tokens=2).result()
        running = local.generate(PROMPT, max_tokens=32, ignore_eos=True)
        next(running)
        overwrite(engine / WEIGHTS_FILE)
        with pytest.raises(EngineCorruptError, match="written to while"):
            running.result()


def test_the_time_of_writing_set_back_does_not_hide_it(engine: Path) -> None:
    weights = engine / WEIGHTS_FILE
    with closing(opened(engine)) as local:
        before = weights.stat()
        overwrite(weights)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(EngineCorruptError, match="written to while"):
            local.generate(PROMPT, max_tokens=2)


def test_what_leaves_the_content_alone_is_no_damage(engine: Path, tmp_path: Path) -> None:
    with closing(opened(engine)) as local:
        expected = local.generate(PROMPT, max_tokens=4, temperature=0).result().token_ids
        (engine / WEIGHTS_FILE).chmod(0o600)
        os.link(engine / WEIGHTS_FILE, tmp_path / "link")
        assert local.generate(PROMPT, max_tokens=4, temperature=0).result().token_ids == expected
        # Replaced, as a build with --force does: the engine goes on with what it opened.
        shutil.rmtree(engine)
        assert local.generate(PROMPT, max_tokens=4, temperature=0).result().token_ids == expected


def object_of(engine: Path) -> Path:
    (path,) = engine.glob("engine-*.so")
    return path


@pytest.mark.parametrize("content", [b"", b"\xcc" * (1 << 20)], ids=["truncated", "overwritten"])
def test_code_is_a_copy_that_nobody_can_change(engine: Path, content: bytes) -> None:
    with closing(opened(engine)) as local:
        expected = local.generate(PROMPT, max_tokens=16, temperature=0).result().token_ids
        running = local.generate(PROMPT, max_tokens=100, temperature=0, ignore_eos=True)
        next(running)
        with object_of(engine).open("r+b") as file:
            file.truncate(len(content))
            file.write(content)
        assert running.result().token_ids[:16] == expected
        assert local.generate(PROMPT, max_tokens=16, temperature=0).result().token_ids == expected


def test_code_that_is_swapped_after_its_hash_was_compared_is_not_run(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back before the end of opening, as somebody who wins a race would."""
    wait = HashCheck.wait

    def then_swap(check: HashCheck) -> None:
        wait(check)
        with object_of(engine).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    monkeypatch.setattr(HashCheck, "wait", then_swap)
    with pytest.raises(EngineCorruptError, match="sha256") as caught:
        opened(engine)
    assert caught.value.field == str(object_of(engine))


def test_a_file_swapped_between_hashing_and_mapping_is_refused(engine: Path) -> None:
    manifest = read_manifest(engine)
    found = find_files(engine, manifest, [WEIGHTS_FILE])
    check = HashCheck(engine, manifest, [WEIGHTS_FILE], found)
    check.wait()
    check.close()
    shutil.copy(engine / WEIGHTS_FILE, engine / "copy")
    (engine / "copy").replace(engine / WEIGHTS_FILE)
    with pytest.raises(EngineCorruptError, match="while the engine was being opened"):
        map_weights(engine / WEIGHTS_FILE, manifest.ledger.weights, found[WEIGHTS_FILE])
    check = HashCheck(engine, manifest, [WEIGHTS_FILE], found)
    with pytest.raises(EngineCorruptError, match="while the engine was being opened"):
        check.wait()
    check.close()


_TRUNCATE = """
import os, sys, threading
from pathlib import Path
from typing import Any
from trtc import open_engine
engine = open_engine(sys.argv[1], num_threads=1, kv_bytes=1 << 22)
engine.generate((5, 17, 9), max_tokens=2).result()
running = engine.generate((5, 17, 9), max_tokens=200, ignore_eos=True)
next(running)
weights = Path(sys.argv[1]) / "weights.safetensors"
os.truncate(weights, 4096)
try:
    print(running.result())
except BaseException as error:
    print("noticed:", error, file=sys.stderr)
    os._exit(4)
"""


def test_truncated_weights_end_the_process_with_one_line(engine: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _TRUNCATE, str(engine)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == EngineCorruptError.exit_code, ended
    assert ended.stderr.count("\n") == 1
    assert str(engine / WEIGHTS_FILE) in ended.stderr and "truncated" in ended.stderr
    assert "Copy the engine again" in ended.stderr


def readiness(port: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{port}/readyz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_server_whose_weights_are_overwritten_stops_being_ready(engine: Path) -> None:
    server = Serving(engine)
    try:
        ports = server.wait_for(r"serving engines=engine grpc=127.0.0.1:(\d+) http=.*:(\d+)")
        http = f"127.0.0.1:{ports[2]}"
        with Client(f"127.0.0.1:{ports[1]}") as client:
            assert client.generate(PROMPT, max_tokens=2).result().token_ids
            assert readiness(http)[0] == 200
            overwrite(engine / WEIGHTS_FILE)
            deadline = time.monotonic() + 60
            while (found := readiness(http))[0] == 200 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert found[0] == 503 and "written to while" in json.dumps(found[1])
            with pytest.raises(TrtcError, match=WEIGHTS_FILE):
                client.generate(PROMPT, max_tokens=2).result()
        server.stop()
    finally:
        server.process.kill()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Weights of three stages of an upload and a bit."""
    path = tmp_path / "large.safetensors"
    data = np.random.default_rng(0).integers(0, 256, 3 * (32 << 20) + 12345, np.uint8)
    path.write_bytes((56).to_bytes(8, "little") + b" " * 56 + data.tobytes())
    return path


def test_a_gpu_gets_the_weights_that_the_file_has(large: Path) -> None:
    expected = np.fromfile(large, np.uint8)[64:]
    with closing(WeightsFile(large, len(expected))) as weights:
        gpu: Any = StagingGpu(len(expected))
        GpuTransfers(gpu, EventWaiter(gpu, is_rank=False)).fill(0, weights)
    np.testing.assert_array_equal(gpu.memory, expected)


@pytest.mark.parametrize("left", [0, 64, 4096, 40 << 20])
def test_weights_truncated_while_they_are_copied_to_a_gpu_are_one_error(
    large: Path, left: int
) -> None:
    """In this process: a mapping would end it."""
    num_bytes = large.stat().st_size - 64
    with closing(WeightsFile(large, num_bytes)) as weights:
        os.truncate(large, left)
        gpu: Any = StagingGpu(num_bytes)
        with pytest.raises(EngineCorruptError, match="truncated") as caught:
            GpuTransfers(gpu, EventWaiter(gpu, is_rank=False)).fill(0, weights)
    assert caught.value.field == str(large)


def test_weights_swapped_before_they_are_copied_are_refused(large: Path) -> None:
    found = FileIdentity.of(large.stat())
    shutil.copy(large, large.with_name("copy"))
    large.with_name("copy").replace(large)
    with pytest.raises(EngineCorruptError, match="while the engine was being opened"):
        WeightsFile(large, found.bytes - 64, found)
