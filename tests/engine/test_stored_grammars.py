"""Grammars of an engine: compiled at build, bound to the tokenizer, and named by requests."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from trtc.builder.grammar_files import parse_grammars
from trtc.builder.package import seal
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.targets.cpu import CpuTarget
from trtc.cli import cli
from trtc.plugins.cpu.host import runnable_isas
from trtc.protos.errors import (
    EngineCorruptError,
    EnvironmentFault,
    InvalidRequestError,
    RequestError,
)
from trtc.protos.grammars import GRAMMARS_FILE, read_grammars
from trtc.protos.manifest import read_manifest
from trtc.runtime.engine.probe import Probe
from trtc.runtime.frontends.local import LocalEngine

MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"
TARGET = CpuTarget(runnable_isas()[:1], optimization="-O0")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
LONGEST = 240
"""More tokens than a document of SCHEMA has characters: four gaps of at most 40 each."""


def request_of(output: Path, grammars: list[str], model: Path = MODEL) -> BuildRequest:
    return BuildRequest(
        model=str(model),
        output=output,
        max_batch_size=2,
        max_seq_len=256,
        max_num_tokens=32,
        eval_tokens=0,
        grammars=parse_grammars(grammars),
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grammars")
    (directory / "record.json").write_text(json.dumps(SCHEMA))
    (directory / "word.regex").write_text("[ab]{3}\n")
    (directory / "sum.lark").write_text('start: "1" ("+" "1")~2')
    tag = {"format": {"type": "const_string", "value": "<x>"}}
    (directory / "tag.json").write_text(json.dumps(tag))
    asked = [
        f"record={directory}/record.json",
        f"word={directory}/word.regex",
        f"sum={directory}/sum.lark",
        f"tag=structural_tag:{directory}/tag.json",
    ]
    build(request_of(directory / "engine", asked), probe=Probe(1), target=TARGET)
    return directory / "engine"


EXPECTED: dict[str, Callable[[str], bool]] = {
    "record": lambda text: json.loads(text)["a"] in (1, 2),
    "word": lambda text: len(text) == 3 and set(text) <= {"a", "b"},
    "sum": lambda text: text == "1+1+1",
    "tag": lambda text: text == "<x>",
}


def test_requests_name_grammars_of_their_engine(engine: Path) -> None:
    with LocalEngine.open(engine) as opened:
        for name, is_right in EXPECTED.items():
            result = opened.generate("a", grammar_name=name, max_tokens=LONGEST, n=2).result()
            assert all(is_right(one.text) for one in result.completions), result
        with pytest.raises(InvalidRequestError, match="no grammar 'other'") as caught:
            opened.generate("a", grammar_name="other")
        assert caught.value.field == "grammar_name"
        assert "Give one of record, sum, tag, word" in str(caught.value)
        with pytest.raises(InvalidRequestError, match="grammar_name: is given beside regex"):
            opened.generate("a", grammar_name="word", regex="a")


def test_files_hold_what_was_given_and_no_path(engine: Path) -> None:
    grammars = read_grammars(engine, read_manifest(engine))
    assert {name: (one.kind, one.source) for name, one in grammars.items()} == {
        "record": ("json_schema", "record.json"),
        "word": ("regex", "word.regex"),
        "sum": ("lark", "sum.lark"),
        "tag": ("structural_tag", "tag.json"),
    }
    assert grammars["word"].text == "[ab]{3}"
    provenance = read_manifest(engine).provenance
    assert provenance is not None
    assert provenance.options["grammars"].startswith("record=json_schema:record.json, word=")


def test_inspect_lists_them(engine: Path) -> None:
    shown = CliRunner().invoke(cli, ["inspect", str(engine)])
    assert shown.exit_code == 0
    for name, one in read_grammars(engine, read_manifest(engine)).items():
        assert re.search(rf"{name} +{one.kind} +{re.escape(one.source)}", shown.output)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("a.json", "{", "cannot be compiled"),
        ("a.regex", "(", "cannot be compiled"),
        ("a.lark", "start: x", "cannot be compiled"),
        ("a.regex", "((a{1,1000}){1,1000}){1,1000}(" + "(" * 5000, "cannot be compiled"),
        ("a.json", " " * (1 << 18) + "{}", "more than the 262144 that are read"),
        ("a.regex", b"\xff", "invalid start byte"),
    ],
)
def test_a_bad_grammar_fails_the_build_with_its_file(
    name: str, content: Any, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    request = request_of(tmp_path / "engine", [f"x={path}"])
    with pytest.raises(RequestError) as caught:
        build(request, probe=Probe(1), target=TARGET)
    assert caught.value.field == f"--grammar x={path}"
    assert problem in caught.value.problem
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_what_cannot_be_tried_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.regex"
    with pytest.raises(RequestError, match="cannot be read"):
        build(request_of(tmp_path / "engine", [f"x={path}"]), probe=Probe(1), target=TARGET)
    path.write_text("a")
    with pytest.raises(EnvironmentFault, match="nothing to compile it with"):
        build(request_of(tmp_path / "engine", [f"x={path}"]), target=TARGET)
    bare = Path(shutil.copytree(MODEL, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="has no tokenizer"):
        build(request_of(tmp_path / "engine", [f"x={path}"], bare), target=TARGET)


def altered(engine: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose grammars somebody with bad intentions has written, sealed anew."""
    shutil.copytree(engine, to)
    content = msgspec.json.decode((to / GRAMMARS_FILE).read_bytes())
    change(content)
    (to / GRAMMARS_FILE).write_bytes(msgspec.json.encode(content))
    seal(to, msgspec.structs.replace(read_manifest(to), files={}, digest=""))
    return to


def test_files_that_were_changed_do_not_open(engine: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(engine, tmp_path / "damaged"))
    text = (damaged / GRAMMARS_FILE).read_text()
    (damaged / GRAMMARS_FILE).write_text(text.replace("[ab]", "[cd]"))
    with pytest.raises(EngineCorruptError, match="sha256"):
        LocalEngine.open(damaged)
    other = altered(engine, tmp_path / "other", lambda one: one.update(tokenizer_sha256="0" * 64))
    with pytest.raises(EngineCorruptError, match="is of another tokenizer"):
        LocalEngine.open(other)

    def add_many(content: dict[str, Any]) -> None:
        word = content["grammars"]["word"]
        content["grammars"] = {f"w{number}": word for number in range(65)}

    with pytest.raises(EngineCorruptError, match=r"length <= 64"):
        LocalEngine.open(altered(engine, tmp_path / "many", add_many))


def test_an_engine_with_hostile_grammars_opens(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They fail alone, in a process with limits, and so do requests that name them."""

    def add_hostile(content: dict[str, Any]) -> None:
        deep = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
        content["grammars"]["deep"] = {"kind": "json_schema", "text": deep, "source": "x"}

    hostile = altered(engine, tmp_path / "hostile", add_hostile)
    with caplog.at_level(logging.WARNING, "trtc.server"), LocalEngine.open(hostile) as opened:
        with pytest.raises(InvalidRequestError, match="grammar_name: cannot be compiled"):
            opened.generate("a", grammar_name="deep")
        result = opened.generate("a", grammar_name="sum", max_tokens=20).result()
        assert result.text == "1+1+1"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["a"], "is 'a'. Give NAME=FILE"),
        (["a b=c.json"], "Give NAME=FILE"),
        (["a="], "Give NAME=FILE"),
        (["a=b.txt"], "b.txt has none of the suffixes"),
        (["a=xml:b.json", "a=b.json"], "gives the name 'a' twice"),
        ([f"a{number}=b.json" for number in range(65)], "is given 65 times"),
    ],
)
def test_options_that_are_wrong_are_refused(options: list[str], problem: str) -> None:
    with pytest.raises(RequestError, match="--grammar") as caught:
        parse_grammars(options)
    assert problem in str(caught.value)
