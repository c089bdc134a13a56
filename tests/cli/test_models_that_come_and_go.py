"""`trtc serve --models` on real engines, in a process of its own: memory, files, versions."""

import json
import re
import shutil
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint
from tests.support.servers import TOKENIZER
from tests.support.serving import Serving
from trtc import open_engine
from trtc.protos.errors import UnavailableError
from trtc.protos.manifest import WEIGHTS_FILE
from trtc.runtime.client import Client

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # gevent warns about itself
    triton: Any = pytest.importorskip("tritonclient.http", reason="make setup installs it")
from tritonclient.utils import InferenceServerException

PROMPT = (5, 17, 9)
NUM_ROUNDS = 20


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a model, whose tokens differ."""
    root = tmp_path_factory.mktemp("engines")
    limits: Any = {"max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 64}
    build_tiny(TOKENIZER, root / "first", "bf16", **limits)
    build_tiny(TOKENIZER.parent / "pyllama-draft", root / "second", "bf16", **limits)
    return {name: root / name for name in ("first", "second")}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose cache takes 16 kB a token: few tokens fill a pool."""
    root = tmp_path_factory.mktemp("roomy")
    heads: Any = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    model = tiny_checkpoint("llama", root, "bfloat16", num_hidden_layers=4, **heads)
    limits: Any = {"max_batch_size": 8, "max_num_tokens": 64}
    build_tiny(model, root / "engine", "bf16", optimization="-O1", **limits)
    return root / "engine"


@pytest.fixture
def models(engines: dict[str, Path], tmp_path: Path) -> Path:
    """With the first version of `a`."""
    shutil.copytree(engines["first"], tmp_path / "models" / "a" / "1")
    return tmp_path / "models"


class Server:
    """A running `trtc serve --models`."""

    def __init__(self, models: Path, *arguments: str) -> None:
        self.serving = Serving("--models", models, *arguments)
        found = self.serving.wait_for(r"(serving|listening).* grpc=.*:(\d+) http=.*:(\d+)")
        self.grpc_port, self.http_port = int(found[2]), int(found[3])
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self.http_port}")

    def is_gone(self, model: str) -> bool:
        return not self.client.is_model_ready(model)

    def anonymous_bytes(self) -> int:
        """Memory of the process by itself."""
        status = Path(f"/proc/{self.serving.process.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024

    def mapped(self) -> str:
        return Path(f"/proc/{self.serving.process.pid}/maps").read_text()

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.serving.process.pid}/fd").iterdir()))


@contextmanager
def serving(models: Path) -> Iterator[Server]:
    one = Server(models, "--explicit", "--load", "a", "--kv-bytes", "100000000")
    try:
        yield one
        one.client.close()
        assert one.serving.stop() == 0
    finally:
        one.serving.process.kill()


@pytest.fixture
def server(models: Path) -> Iterator[Server]:
    with serving(models) as one:
        yield one


@pytest.fixture
def roomy_server(roomy: Path, tmp_path: Path) -> Iterator[Server]:
    """Of the engine with a large cache, as `a`."""
    shutil.copytree(roomy, tmp_path / "roomy" / "a" / "1")
    with serving(tmp_path / "roomy") as one:
        yield one


def fill_pool(client: Client, number: int) -> None:
    """Prompts of 100 tokens, none of which begins as another does."""
    for one in range(number):
        prompt = [(one * 7 + at * 3) % 150 + 3 for at in range(100)]
        client.generate(prompt, model="a", max_tokens=2, temperature=0.0, ignore_eos=True).result()


def tokens(engine: Path, number: int) -> list[int]:
    with open_engine(engine, num_threads=1, kv_bytes=16_000_000) as opened:
        generation = opened.generate(PROMPT, max_tokens=number, temperature=0.0, ignore_eos=True)
        return list(generation.result().token_ids)


def test_streams_end_on_their_version_while_new_requests_get_the_next(
    server: Server, models: Path, engines: dict[str, Path]
) -> None:
    old, new = (tokens(engines[one], 400) for one in ("first", "second"))
    assert old != new
    with Client(f"127.0.0.1:{server.grpc_port}") as client:
        wanted: Any = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        running = client.generate(PROMPT, model="a", **wanted)
        next(running)
        shutil.copytree(engines["second"], models / "a" / "2")
        server.client.load_model("a")
        later = client.generate(PROMPT, model="a", **wanted)
        assert list(later.result().token_ids) == new
        assert list(running.result().token_ids) == old
    weights = f"a/1/{WEIGHTS_FILE}"
    deadline = time.monotonic() + 10
    while weights in server.mapped():
        assert time.monotonic() < deadline, "the old weights are still mapped"
        time.sleep(0.05)
    assert f"a/2/{WEIGHTS_FILE}" in server.mapped()


def test_memory_and_files_of_models_that_go_are_given_back(roomy_server: Server) -> None:
    """Of a pool of 100 MB, more than half is used before the model goes."""
    server = roomy_server
    marks: list[tuple[int, int]] = []
    for at in range(NUM_ROUNDS):
        if at % 10 == 1:
            with Client(f"127.0.0.1:{server.grpc_port}") as client:
                fill_pool(client, 40)
            loaded = server.anonymous_bytes()
        server.client.unload_model("a")
        assert server.is_gone("a")
        assert WEIGHTS_FILE not in server.mapped()
        marks.append((server.anonymous_bytes(), server.num_files()))
        if at % 10 == 1:
            assert loaded - marks[-1][0] > 30e6, (loaded, marks)
        server.client.load_model("a")
    (early, early_files), (late, late_files) = marks[4], marks[-1]
    assert late - early < 8e6, marks
    assert late_files <= early_files, marks


def test_what_is_forged_or_too_large_is_refused_and_the_old_one_serves(
    server: Server, models: Path, engines: dict[str, Path]
) -> None:
    shutil.copytree(engines["second"], models / "a" / "2")
    weights = models / "a" / "2" / WEIGHTS_FILE
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InferenceServerException, match="differs from the manifest's sha256"):
        server.client.load_model("a")
    shutil.copytree(engines["second"], models / "b")
    (models / "b" / "extra.so").write_bytes(b"code")
    with pytest.raises(InferenceServerException, match=r"extra\.so"):
        server.client.load_model("b")
    (models / "b" / "extra.so").unlink()
    server.client.load_model("b")
    index = {one["name"]: one["state"] for one in server.client.get_model_repository_index()}
    assert index == {"a": "READY", "b": "READY"}
    assert server.client.is_model_ready("a", "1")


def order(server: Server, path: str) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}", method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_sleeps_gives_memory_back_and_wakes_with_its_tokens(
    level: int, roomy_server: Server, roomy: Path
) -> None:
    server = roomy_server
    wanted: Any = {"max_tokens": 25, "temperature": 0.0, "ignore_eos": True}
    expected = tokens(roomy, 25)
    with Client(f"127.0.0.1:{server.grpc_port}") as client:
        fill_pool(client, 30)
        assert list(client.generate(PROMPT, **wanted).result().token_ids) == expected
        awake = server.anonymous_bytes()
        (slept,) = order(server, f"/sleep?level={level}")["slept"]
        assert slept["freed_bytes"] > 90e6
        assert awake - server.anonymous_bytes() > 30e6
        assert (WEIGHTS_FILE in server.mapped()) == (level == 1)  # mapped, and not copied
        assert (slept["kept_bytes"] > 0) == (level == 1)
        with pytest.raises(UnavailableError, match="asleep"):
            client.generate(PROMPT, **wanted).result()
        (woken,) = order(server, "/wake_up")["woken"]
        assert woken["seconds"] > 0
        assert list(client.generate(PROMPT, **wanted).result().token_ids) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_were_written_to_meanwhile_do_not_wake(
    level: int, server: Server, models: Path
) -> None:
    order(server, f"/sleep?level={level}")
    weights = models / "a" / "1" / WEIGHTS_FILE
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(urllib.error.HTTPError) as refused:
        order(server, "/wake_up")
    assert b"differs from the manifest's sha256" in refused.value.read()
