"""The format of thoughts and calls is found in the chat template."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.support.answers import written
from tests.support.engines import build_tiny
from tests.support.servers import TOKENIZER
from trtc.builder.answer_format import detected_format
from trtc.builder.request import BuildRequest
from trtc.protos.answer_formats import ANSWER_FORMATS
from trtc.protos.errors import RequestError
from trtc.protos.manifest import read_manifest
from trtc.runtime.text.chat import TemplateInput
from trtc.runtime.text.tokenizer import Tokenizer

_CALLS = [("get_weather", {"city": "Paris"})]
_EXTRA = {
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>",
    "llama3_json": "<|python_tag|>",
}


def _template(name: str) -> str:
    form = ANSWER_FORMATS[name]
    return _EXTRA.get(name, "") + written(name, "hm", "", _CALLS if form.call is not None else [])


@pytest.mark.parametrize("name", [one for one in ANSWER_FORMATS if one not in ("none", "think")])
def test_a_template_shows_its_format(name: str, tmp_path: Path) -> None:
    jinja = tmp_path / "chat_template.jinja"
    jinja.write_text(_template(name))
    assert detected_format([jinja]) == name
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": _template(name)}))
    assert detected_format([config]) == name
    config.write_text(json.dumps({"chat_template": [{"name": "x", "template": _template(name)}]}))
    assert detected_format([config]) == name


@pytest.mark.parametrize(("model", "name"), [("gpt_oss", "harmony"), ("gemma4", "gemma")])
def test_the_template_of_a_model_shows_its_format(model: str, name: str, tmp_path: Path) -> None:
    templates = Path(__file__).parents[1] / "runtime" / "text" / "templates"
    jinja = tmp_path / "chat_template.jinja"
    jinja.write_bytes((templates / f"{model}.jinja").read_bytes())
    assert detected_format([jinja]) == name


def test_templates_without_calls(tmp_path: Path) -> None:
    jinja = tmp_path / "chat_template.jinja"
    jinja.write_text("{{ messages }}<think>\n")
    assert detected_format([jinja]) == "think"
    jinja.write_text("{{ messages }}")
    assert detected_format([jinja]) == "none"
    assert detected_format([]) == "none"


def test_an_engine_has_the_format_that_was_asked_for(tmp_path: Path) -> None:
    build_tiny(
        TOKENIZER, tmp_path / "e", answer_format="hermes", dummy_weights=True, max_num_tokens=64
    )
    assert read_manifest(tmp_path / "e").format_name == "hermes"


def test_an_engine_without_a_format_says_nothing_of_one(tmp_path: Path) -> None:
    build_tiny(TOKENIZER, tmp_path / "e", dummy_weights=True, max_num_tokens=64)
    manifest = read_manifest(tmp_path / "e")
    assert manifest.format_name == "none"
    assert "answer_format" not in msgspec.to_builtins(manifest)


def test_an_unknown_format_is_refused_with_the_choices() -> None:
    request = BuildRequest(model="m", output=Path("e"), answer_format="xml")
    with pytest.raises(RequestError, match=r"--format: is 'xml'\. Use one of none, .*hermes"):
        request.check()


def test_an_engine_has_the_template_for_tools_and_its_format(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TOKENIZER, model)
    extra = model / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("<tool_call>{{ tools | length }}")
    (extra / "rag.jinja").write_text("documents")
    build_tiny(model, tmp_path / "e", dummy_weights=True, max_num_tokens=64)
    manifest = read_manifest(tmp_path / "e")
    assert manifest.format_name == "hermes"
    assert [name for name in manifest.files if "additional" in name] == [
        "tokenizer/additional_chat_templates/tool_use.jinja"
    ]
    assert manifest.provenance is not None
    assert "additional_chat_templates/tool_use.jinja" in manifest.provenance.checkpoint
    shown = Tokenizer.load(tmp_path / "e" / "tokenizer")
    assert shown.apply_chat_template(TemplateInput([], {"tools": [1]})) == "<tool_call>1"
    shown.close()
