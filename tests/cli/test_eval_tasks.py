"""`trtc eval --tasks`: lm-evaluation-harness in this process and against `trtc serve`, held against
its own model `hf` on the same checkpoint."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.engines import build_tiny
from tests.support.servers import TOKENIZER
from tests.support.serving import Serving
from trtc.cli import main

MAX_SEQ_LEN = 256
SCORED = MAX_SEQ_LEN - 2
"""Tokens of a window of a long text: one stands before it, and one is drawn after it."""
TASKS = "write,pick,read"
PICK = (
    ("for i in", [" class", " range(10):", " import"], 1),
    ("def read(path):\n    with open(path) as file:\n        return file", [" = 7", ".read()"], 1),
    ("", ["import os\n", "7 7 7"], 0),
)
WRITE = ("import os\nimport ", "def add(a, b):\n    return ", "class Stack:\n    def __init__(")
READ = ("class Stack:\n    pass\n", (Path(__file__).parents[1] / "conftest.py").read_text()[:1800])
NOISE = 0.05
"""Nats a token, of bf16 and of weights in 12 bits."""
Samples = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return pytest.importorskip("lm_eval", reason="make setup installs it")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "pyllama"
    build_tiny(
        TOKENIZER, path, "bf16", max_seq_len=MAX_SEQ_LEN, max_batch_size=8, max_num_tokens=64
    )
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of each kind over local data."""
    directory = tmp_path_factory.mktemp("tasks")
    rows: Mapping[str, list[dict[str, Any]]] = {
        "pick": [{"q": q, "options": options, "a": a} for q, options, a in PICK],
        "write": [{"q": q} for q in WRITE],
        "read": [{"q": q} for q in READ],
    }
    settings: Mapping[str, dict[str, Any]] = {
        "pick": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{options}}",
            "doc_to_target": "a",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "write": {
            "output_type": "generate_until",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\n\n", ":\n"], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}],
        },
        "read": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }
    for name, own in settings.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(directory / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": source}
        document = {**task, "test_split": "test", "doc_to_text": "{{q}}", **own}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return directory


@pytest.fixture(scope="module")
def evaluated(harness: ModuleType, tasks: Path) -> Callable[..., Samples]:
    """What lm-eval itself finds with one of its models."""
    evaluator = importlib.import_module("lm_eval.evaluator")
    manager = importlib.import_module("lm_eval.tasks").TaskManager

    def evaluate(model: Any, **options: Any) -> Samples:
        own = manager(include_path=str(tasks), include_defaults=False)
        loaded = own.load(TASKS.split(","))
        for task in loaded["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        found: Samples = evaluator.evaluate(lm=model, task_dict=loaded, **options)["samples"]
        return found

    return evaluate


@pytest.fixture(scope="module")
def transformers_model(harness: ModuleType) -> Any:
    """lm-eval's own, in fp32."""
    model = importlib.import_module("lm_eval.models.huggingface").HFLM
    return model(
        pretrained=str(TOKENIZER), dtype="float32", device="cpu", batch_size=4, max_length=SCORED
    )


@pytest.fixture(scope="module")
def served(engine: Path, harness: ModuleType) -> Iterator[Any]:
    """lm-eval's client of completions, unmodified, of a server with the engine."""
    serving = Serving(f"pyllama={engine}")
    try:
        port = serving.wait_for(r"serving .*grpc=127.0.0.1:\d+ http=.*:(\d+)")[1]
        yield importlib.import_module("lm_eval.models.openai_completions").LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{port}/v1/completions",
            model="pyllama",
            tokenizer=str(TOKENIZER),
            num_concurrent=4,
            max_length=MAX_SEQ_LEN,
        )
    finally:
        serving.stop()


def of_trtc(
    engine: Path, tasks: Path, output: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[Samples, str]:
    """The samples that `trtc eval` writes, and what it prints."""
    arguments = ("--tasks", TASKS, "--include-path", str(tasks), "--output", str(output))
    status = main(["eval", str(engine), *arguments, *options, "--threads", "1"])
    out, err = capsys.readouterr()
    assert status == 0, err
    samples: Samples = json.loads(output.read_text())["samples"]
    return samples, out


def scores(samples: Samples) -> list[tuple[float, bool]]:
    """Log-likelihood and greediness of each choice."""
    return [tuple(answer) for row in samples["pick"] for (answer,) in row["resps"]]


def texts(samples: Samples) -> list[str]:
    return [row["resps"][0][0] for row in samples["write"]]


def readings(samples: Samples) -> list[float]:
    return [float(row["resps"][0][0]) for row in samples["read"]]


def test_an_engine_a_server_and_transformers_agree(
    engine: Path,
    tasks: Path,
    evaluated: Callable[..., Samples],
    transformers_model: Any,
    served: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, out = of_trtc(engine, tasks, tmp_path / "out.json", capsys)
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    values = {row[4].strip(): row[6].strip() for row in rows}
    over_http, exact = evaluated(served), evaluated(transformers_model)
    rights = [row["acc"] for row in exact["pick"]]
    assert values["acc"] == f"{sum(rights) / len(rights):.4f}"
    assert texts(own) == texts(over_http) == texts(exact)
    assert all(texts(own)) and not any("\n\n" in one or ":\n" in one for one in texts(own))
    np.testing.assert_allclose(readings(own), readings(over_http), rtol=1e-6)
    np.testing.assert_allclose(readings(own), readings(exact), rtol=NOISE)
    for (found, greedy), (again, too), (expected, truly) in zip(
        scores(own), scores(over_http), scores(exact), strict=True
    ):
        assert found == pytest.approx(again, rel=1e-6)
        assert found == pytest.approx(expected, abs=4 * NOISE, rel=NOISE)
        assert greedy == too == truly
    assert any(greedy for _, greedy in scores(own))


def test_tasks_are_asked_in_the_chat_template(
    engine: Path,
    tasks: Path,
    evaluated: Callable[..., Samples],
    transformers_model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--apply-chat-template", "--limit", "2")
    own, _ = of_trtc(engine, tasks, tmp_path / "out.json", capsys, *options)
    exact = evaluated(
        transformers_model, limit=2, apply_chat_template=True, fewshot_as_multiturn=True
    )
    assert "<|im_start|>" in own["write"][0]["arguments"][0][0]
    for name in ("write", "pick"):
        assert len(own[name]) == 2
        asked = [[list(one) for one in row["arguments"]] for row in exact[name]]
        assert [row["arguments"] for row in own[name]] == asked
    assert texts(own) == texts(exact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--limit", "3"), "--limit: is of tasks"),
        (("--tasks", "pick", "--window", "9"), "--window: is of a text"),
        (("--tasks", ","), "--tasks: names no task"),
        (("--tasks", "pick", "--output", "/nowhere/x.json"), "--output: is in no directory"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: tuple[str, ...], message: str, harness: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "engine", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_package_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "engine", "--tasks", "hellaswag"]) == 5
    err = capsys.readouterr().err
    assert "--tasks: needs the package lm-eval" in err and "pip install lm-eval" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs: num_beams: is no parameter"),
        ({"generation_kwargs": {"max_gen_toks": 256}}, "a completion has 256 tokens"),
        ({"unsafe_code": True}, "--tasks: write: runs what the model writes"),
        ({"dataset_kwargs": {"data_files": "/absent.jsonl"}}, "data cannot be read"),
    ],
)
def test_tasks_that_an_engine_cannot_do_are_refused(
    engine: Path,
    tasks: Path,
    change: Mapping[str, Any],
    message: str,
    harness: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = {**yaml.safe_load((tasks / "write.yaml").read_text()), **change}
    (tmp_path / "write.yaml").write_text(yaml.safe_dump(document))
    arguments = ("--tasks", "write", "--include-path", str(tmp_path))
    assert main(["eval", str(engine), *arguments, "--threads", "1"]) in (2, 5)
    assert message in " ".join(capsys.readouterr().err.split())


def test_samples_examples_and_long_prompts(
    engine: Path,
    tasks: Path,
    harness: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": q}) + "\n" for q in ("x = 1\n" * 200, "def f(")))
    change = {
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "generation_kwargs": {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12},
        "repeats": 2,
    }
    document = {**yaml.safe_load((tasks / "write.yaml").read_text()), **change}
    (tmp_path / "write.yaml").write_text(yaml.safe_dump(document))
    output = tmp_path / "out.json"
    arguments = ("--tasks", "write", "--include-path", str(tmp_path), "--num-fewshot", "1")
    status = main(
        ["eval", str(engine), *arguments, "--output", str(output), "--json", "--threads", "1"]
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "4 prompts lost their beginnings" in err, "the example is the other question"
    assert json.loads(out)["n-shot"] == {"write": 1}
    for row in json.loads(output.read_text())["samples"]["write"]:
        first, second = row["resps"][0]
        assert first and first != second
