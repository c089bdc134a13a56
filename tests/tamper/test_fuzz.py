"""Whatever the files of an engine hold, with every digest mended, a command ends in a result or one
line.

TRTC_FUZZ_CASES=2000 runs more cases than the few of every test run.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tamper.support import replace_file, reseal, write_sealed
from trtc.cli import main
from trtc.protos.errors import EngineError, TrtcError
from trtc.protos.manifest import MANIFEST_FILE, read_manifest
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.opening import open_handle

NUM_CASES = int(os.environ.get("TRTC_FUZZ_CASES", "48"))
POOL = ["--kv-bytes", str(1 << 22), "--threads", "1"]
DEEP = "[" * 100_000
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**70, -(2**63), 0.5, 1e308, float("inf"), "", "x" * 5000,
    "../../etc/passwd", "\0", [], {}, [[]], {"": {}},
]  # fmt: skip

GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "truncated": lambda whole: whole[: len(whole) // 2],
    "noise": lambda whole: random.Random(0).randbytes(4096),
    "zeros": lambda whole: bytes(len(whole)),
    "deep list": lambda whole: DEEP.encode(),
    "deep object": lambda whole: b'{"a":' * 100_000,
    "deep inside": lambda whole: b'{"kv":' + DEEP.encode() + whole.lstrip()[1:],
    "wrong type": lambda whole: b"[1, 2, 3]",
    "null": lambda whole: b"null",
    "no text": lambda whole: b"\xff\xfe" + whole,
    "twice": lambda whole: whole.rstrip()[:-1] + b"," + whole.lstrip()[1:],
}


def linked_copy(pristine: Path, target: Path) -> Path:
    """Hard links: whoever alters a file replaces it."""
    return Path(shutil.copytree(pristine, target, copy_function=os.link))


def fresh_manifest(engine: Path) -> None:
    """A file of its own, so that writing to it leaves the pristine one alone."""
    content = (engine / MANIFEST_FILE).read_bytes()
    (engine / MANIFEST_FILE).unlink()
    (engine / MANIFEST_FILE).write_bytes(content)


def write(engine: Path, name: str, content: bytes) -> None:
    (engine / name).unlink()
    if name == MANIFEST_FILE:
        (engine / name).write_bytes(content)
    else:
        fresh_manifest(engine)
        replace_file(engine, name, content)


def commands(path: str, name: str, scratch: Path) -> list[list[str]]:
    """Those that read the file, and `generate`, which opens all."""
    found = [["generate", path, "--prompt", "def", "--max-tokens", "1", *POOL], ["verify", path]]
    if name in (MANIFEST_FILE, "plan.json"):
        found += [["inspect", path, *more] for more in ([], ["--plan"], ["--plan", "--json"])]
    if name == MANIFEST_FILE:
        found += [["package", path, str(scratch / "models"), "--force"]]
        found += [["tune", path], ["compile", path]]
    if name == MANIFEST_FILE or name.startswith("tokenizer"):
        text = scratch / "text.txt"
        text.write_text("def main():\n    return 0\n" * 40)
        found += [["eval", path, "--text", str(text), "--max-tokens", "64", "--threads", "1"]]
    return found


def run_everything(engine: Path, name: str, scratch: Path) -> None:
    """Any exception but a TrtcError fails the test."""
    for command in commands(str(engine), name, scratch):
        assert main(command) in (0, 1, 2, 3, 4, 5, 6), command
    try:
        source = EngineSource("engine", engine)
        config = EngineConfig(num_threads=1, kv_bytes=1 << 22)
        handle = open_handle(source, config)
    except TrtcError:
        return
    handle.loop.stop()
    handle.close()


def files_of(engine: Path) -> list[str]:
    return [MANIFEST_FILE, *sorted(read_manifest(engine).files)]


@pytest.mark.parametrize("kind", GARBAGE)
def test_files_of_garbage(kind: str, pristine: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files_of(pristine)):
        engine = linked_copy(pristine, tmp_path / str(number))
        write(engine, name, GARBAGE[kind]((pristine / name).read_bytes()))
        run_everything(engine, name, tmp_path)
        shutil.rmtree(engine)


def mutate(document: Any, dice: random.Random) -> Any:
    """Replace, remove or add one value somewhere."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting and len(places) < 20_000:
        parent = waiting.pop()
        keys = parent if isinstance(parent, dict) else range(len(parent))
        for key in keys:
            places.append((parent, key))
            if isinstance(parent[key], dict | list):
                waiting.append(parent[key])
    parent, key = dice.choice(places)
    action = dice.choice(("replace", "replace", "replace", "remove", "add"))
    if action == "replace":
        parent[key] = dice.choice(VALUES)
    elif action == "remove":
        del parent[key]
    elif isinstance(parent, dict):
        parent["unknown"] = dice.choice(VALUES)
    else:
        parent.append(dice.choice(VALUES))
    return document


def test_altered_values(pristine: Path, tmp_path: Path) -> None:
    dice = random.Random(20)
    names = [name for name in files_of(pristine) if name.endswith(".json")]
    for number in range(NUM_CASES):
        name = dice.choice([MANIFEST_FILE, "plan.json", *names])
        engine = linked_copy(pristine, tmp_path / str(number))
        document = mutate(json.loads((pristine / name).read_bytes()), dice)
        fresh_manifest(engine)
        if name == MANIFEST_FILE:
            write_sealed(engine, document)
        else:
            (engine / name).unlink()
            replace_file(engine, name, json.dumps(document).encode())
        try:
            run_everything(engine, name, tmp_path)
        except BaseException as error:
            error.add_note(f"case {number}: {name}")
            raise
        shutil.rmtree(engine)


FORGED: list[tuple[str, str, object]] = [
    ("kv", "page_size", -1),
    ("kv", "page_size", 0),
    ("kv", "page_size", 32),
    ("kv", "groups", []),
    ("kv", "head_dim", 2**40),
    ("kv", "num_layers", 99),
    ("model", "vocab_size", 2**62),
    ("model", "vocab_size", 7),
    ("limits", "max_batch_size", 0),
    ("limits", "max_seq_len", -1),
    ("limits", "max_num_tokens", 10**6),
    ("limits", "max_batch_size", 10**6),
    ("ledger", "weights", 2**70),
    ("ledger", "weights", 64),
    ("target", "archs", []),
    ("target", "tp", 0),
]


@pytest.mark.parametrize(("part", "field", "value"), FORGED)
def test_forged_numbers_are_named(
    part: str, field: str, value: object, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reseal(engine, lambda document: document[part].update({field: value}))
    status = main(["generate", str(engine), "--prompt", "def", "--max-tokens", "1", *POOL])
    said = capsys.readouterr().err
    assert status == EngineError.exit_code and said.count("\n") == 1
    assert field in said


@pytest.mark.parametrize(
    "canary",
    [
        {"prompt_ids": [], "token_ids": [1]},
        {"prompt_ids": [1], "token_ids": []},
        {"prompt_ids": [10**6], "token_ids": [1]},
        {"prompt_ids": [-1], "token_ids": [1]},
        {"prompt_ids": [1] * 300, "token_ids": [1]},
        {"prompt_ids": [1], "token_ids": [1, 2], "margins": [0.5]},
    ],
)
def test_a_canary_that_does_not_fit_is_named(
    canary: object, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reseal(engine, lambda document: document.update(canaries=[canary]))
    assert main(["inspect", str(engine)]) == EngineError.exit_code
    assert "canaries" in capsys.readouterr().err


def test_weights_of_another_plan_are_refused(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same size, other names: the header says what the numbers are."""
    content = (engine / "weights.safetensors").read_bytes()
    name = json.loads((engine / "plan.json").read_bytes())["weights"][0]["name"].encode()
    other = name[:-1] + b"_"
    replace_file(engine, "weights.safetensors", content.replace(b'"' + name, b'"' + other, 1))
    status = main(["generate", str(engine), "--prompt", "def", "--max-tokens", "1", *POOL])
    assert status == EngineError.exit_code
    assert name.decode() in capsys.readouterr().err


def test_what_was_not_altered_runs(pristine: Path) -> None:
    source = EngineSource("engine", pristine)
    config = EngineConfig(num_threads=1, kv_bytes=1 << 22)
    handle = open_handle(source, config)
    handle.loop.stop()
    handle.close()
