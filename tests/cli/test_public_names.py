"""What `import trtc` offers, exactly."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

import trtc
from trtc.builder.grammar_files import parse_grammars
from trtc.builder.request import BuildRequest
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.generate_options import CHAT_KEYWORDS, GENERATE_KEYWORDS
from trtc.runtime.requests.request_input import RequestInput

PUBLIC = {
    "AsyncClient",
    "Client",
    "Output",
    "Result",
    "TrtcError",
    "__version__",
    "build",
    "errors",
    "open_engine",
}


def test_the_public_names_are_these() -> None:
    assert set(trtc.__all__) == PUBLIC
    assert set(dir(trtc)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(trtc, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'bulid'"):
        trtc.bulid  # noqa: B018


def test_importing_trtc_imports_nothing_heavy() -> None:
    code = (
        "import sys, trtc\n"
        "heavy = {'grpc', 'numpy', 'torch', 'onnx', 'click', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_runtime_face_needs_no_builder_package() -> None:
    code = (
        "import sys, trtc\n"
        "trtc.Client, trtc.AsyncClient, trtc.open_engine\n"
        "heavy = {'torch', 'onnx', 'transformers', 'modelopt'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


COMPLETERS: list[type[Any]] = [LocalEngine, trtc.Client, trtc.AsyncClient]
ENTRY_POINTS: list[tuple[Callable[..., object], str, str]] = [
    (trtc.build, "max_batchsize", "max_batch_size"),
    (trtc.open_engine, "num_thread", "num_threads"),
    *((of.generate, "max_token", "max_tokens") for of in COMPLETERS),
    *((of.chat, "add_generation_promt", "add_generation_prompt") for of in COMPLETERS),
]


def test_build_takes_the_fields_of_a_build_request_with_their_defaults() -> None:
    parameters = dict(inspect.signature(trtc.build).parameters)
    del parameters["progress"], parameters["num_threads"]
    assert {name: one.default for name, one in parameters.items()} == {
        one.name: inspect.Parameter.empty if one.default is MISSING else one.default
        for one in fields(BuildRequest)
    }


@pytest.mark.parametrize("of", COMPLETERS)
def test_generate_and_chat_show_every_option_with_its_default(of: type[Any]) -> None:
    """Defaults are those that a request input has for an option that is not given."""
    drafted = asdict(RequestInput())
    for method, keywords in ((of.generate, GENERATE_KEYWORDS), (of.chat, CHAT_KEYWORDS)):
        parameters = inspect.signature(method).parameters
        kinds = {one.kind for one in parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert set(keywords) <= set(parameters)
        for name in set(keywords) & set(drafted):
            assert parameters[name].default == drafted[name]
    assert inspect.signature(of.chat).parameters["continue_final_message"].default is False


@pytest.mark.parametrize(("function", "typo", "meant"), ENTRY_POINTS)
def test_every_parameter_is_described(
    function: Callable[..., object], typo: str, meant: str
) -> None:
    described = inspect.getdoc(function) or ""
    names = set(inspect.signature(function).parameters) - {"self", "prompt", "messages"}
    assert {name for name in names if f"\n    {name}: " not in described} == set()


@pytest.mark.parametrize(("function", "typo", "meant"), ENTRY_POINTS)
def test_a_misspelt_argument_names_the_nearest(
    function: Callable[..., object], typo: str, meant: str
) -> None:
    message = rf"unexpected keyword argument '{typo}'\. Did you mean '{meant}'\?"
    with pytest.raises(TypeError, match=message):
        function("a", "b", **{typo: 1})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        function("a", "b", zzz=1)


def test_build_hands_every_argument_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = tmp_path / "digits.txt"
    digits.write_text("[0-9]+")
    given: dict[str, Any] = {
        name: one.default if isinstance(one.default, bool) else f"{name}!"
        for name, one in inspect.signature(trtc.build).parameters.items()
        if name not in ("progress", "num_threads")
    }
    given = {name: not value if isinstance(value, bool) else value for name, value in given.items()}
    given.update(answer_format="hermes", grammars=f"digits=regex:{digits}", max_bytes="5GB")
    requests: list[BuildRequest] = []
    monkeypatch.setattr(
        "trtc.builder.pipeline.build", lambda request, **_: requests.append(request)
    )
    trtc.build(**given)
    files = ("output", "eval_text", "family", "recipe")
    paths = {name: Path(given[name]) for name in files}
    lists = {"keep": ("keep!",), "grammars": parse_grammars([given["grammars"]])}
    numbers = {"max_bytes": 5_000_000_000}
    assert requests == [BuildRequest(**{**given, **paths, **lists, **numbers})]
