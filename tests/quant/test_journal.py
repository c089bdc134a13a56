"""Calibrations that were killed: they go on where they were, and make the same bytes."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.quant.test_calibrate import HELDOUT, calibration_ids, wide_checkpoint
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.code_grid import GRIDS
from trtc.quant.gptq import InputStatistics, round_weights
from trtc.quant.journal import Journal, SavedLayer, key_of_inputs, open_journals
from trtc.quant.nearest import round_to_nearest
from trtc.quant.rounded_layers import RoundedLayer, read_rounded, save_rounded, stored_bytes
from trtc.quant.scheme import SCHEMES, Gptq
from trtc.quant.site_format import FORMATS

KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.quant.test_calibrate import HELDOUT
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.scheme import SCHEMES
model, text, output, journal = map(Path, sys.argv[1:])

def progress(step):
    if step.done == 1:
        while not list(journal.rglob("streams-00000.safetensors")):
            time.sleep(0.01)  # it is written meanwhile
        os.kill(os.getpid(), signal.SIGKILL)

quantize_checkpoint(model, SCHEMES["iq4"], "bf16", text, output, progress, HELDOUT, journal=journal)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("journal")
    return wide_checkpoint("llama", directory), calibration_ids(directory / "ids.jsonl")


def test_a_killed_calibration_goes_on_and_makes_the_same_bytes(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    model, text = inputs
    whole, resumed, journal = tmp_path / "whole", tmp_path / "resumed", tmp_path / "journal"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, model, text, tmp_path / "killed", journal],
        env=environment,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    steps: list[Step] = []
    facts = quantize_checkpoint(
        model, SCHEMES["iq4"], "bf16", text, resumed, steps.append, HELDOUT, journal=journal
    )
    assert next(step.done for step in steps if step.unit == "layers") == 1, "a layer was there"
    assert facts == quantize_checkpoint(
        model, SCHEMES["iq4"], "bf16", text, whole, lambda step: None, HELDOUT
    )
    files = sorted(path.name for path in whole.iterdir())
    assert files == sorted(path.name for path in resumed.iterdir())
    for name in files:
        assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name
    # Another text has nothing of it, and clears it away.
    other = calibration_ids(tmp_path / "other.jsonl", tokens=5000)
    steps.clear()
    quantize_checkpoint(
        model,
        SCHEMES["iq4"],
        "bf16",
        other,
        tmp_path / "new",
        steps.append,
        HELDOUT,
        journal=journal,
    )
    assert next(step.done for step in steps if step.unit == "layers") == 0
    assert len(list((journal / "calibration").iterdir())) == 1


@pytest.mark.parametrize("family", ["glm_moe_dsa", "gemma4_e"])
def test_a_model_whose_layers_give_more_than_hidden_states_has_none(
    family: str, tmp_path: Path
) -> None:
    """GLM-5's give the tokens that they selected, Gemma 4's small ones their keys and values."""
    model = wide_checkpoint(family, tmp_path)
    text, journal = calibration_ids(tmp_path / "ids.jsonl"), tmp_path / "journal"
    quantize_checkpoint(
        model,
        SCHEMES["iq4_g16"],
        "bf16",
        text,
        tmp_path / "out",
        lambda step: None,
        HELDOUT,
        journal=journal,
    )
    assert not journal.exists()


ERRORS = (LayerError(layer="a", sqnr_db=float("inf"), max_abs_error=0.1),)


def layer(number: int) -> SavedLayer:
    scale = torch.tensor(0.5)
    return SavedLayer({"a": torch.full((4, 8), number), "b": scale, "c": scale}, ERRORS)


def test_what_is_torn_counts_as_absent(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    assert journal.num_layers() == 0
    for number in range(3):
        journal.save(number, layer(number), iter([torch.full((2,), 0.1 + number)]))
    assert journal.num_layers() == 3
    assert journal.layer(1).errors == ERRORS and sorted(journal.layer(1).tensors) == ["a", "b", "c"]
    assert torch.equal(journal.layer(2).tensors["a"], layer(2).tensors["a"])
    (hidden,) = journal.streams(2)
    assert torch.equal(hidden, torch.full((2,), 2.1))
    torn = journal.directory / "layer-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:20])
    assert journal.num_layers() == 0
    assert journal.scores() is None
    scores = {("a", "int8"): 0.1, ("a", "iq4"): 1 / 3}
    journal.save_scores(scores)
    assert journal.scores() == scores
    path = journal.directory / "scores.json"
    path.write_bytes(path.read_bytes()[:20])
    assert journal.scores() is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"bf16"}))
def test_a_weight_is_read_as_it_was_written(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    monkeypatch.setattr("trtc.quant.packed_codes._BYTES_AT_ONCE", 3000)  # some rows at a time
    to, weight = FORMATS[name], torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    if to.is_gptq:
        assert to.group_size is not None
        inputs = InputStatistics(torch.eye(256))
        rounded = round_weights(
            weight, inputs, to.group_size, Gptq(asymmetric=False), GRIDS[to.weight]
        )
    else:
        rounded = round_to_nearest(weight, to)
    journal = Journal(tmp_path, resumes=False)
    twice = RoundedLayer(0, {"a": rounded, "b": rounded}, ())
    save_rounded(journal, twice, {"a": to, "b": to}, ())
    assert journal.num_layers() == 0, "hidden states are not there"
    assert list(read_rounded(journal, 0, ["b"]).linears) == ["b"]
    read = read_rounded(journal, 0, device=device).linears["a"]
    assert read.codes.device.type == read.scales.device.type == device
    for own, same in zip(astuple(rounded), astuple(read.to("cpu")), strict=True):
        assert (own is None) == (same is None)
        assert own is None or (own.dtype == same.dtype and torch.equal(own, same))
    size = (tmp_path / "layer-00000.safetensors").stat().st_size
    header = size - 2 * stored_bytes(to, *weight.shape)
    assert 0 < header < 1500
    assert stored_bytes(to, *weight.shape) < 1.15 * to.num_bits(*weight.shape) / 8, "packed"


def test_an_error_of_writing_is_that_of_the_calibration(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread it comes from, and before another layer is written."""
    written: list[int] = []

    def refuse(journal: Journal, index: int, *given: object) -> None:
        written.append(index)
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(Journal, "save", refuse)
    model, text = inputs
    with pytest.raises(OSError, match="the disk is full"):
        quantize_checkpoint(
            model,
            SCHEMES["iq4"],
            "bf16",
            text,
            tmp_path / "out",
            lambda step: None,
            HELDOUT,
            journal=tmp_path / "journal",
        )
    assert written == [0]


def test_a_key_is_of_every_byte_of_the_checkpoint(tmp_path: Path) -> None:
    for name, content in (("a.safetensors", b"x" * 999), ("config.json", b"{}"), ("b.txt", b"?")):
        (tmp_path / name).write_bytes(content)
    tokens = [[np.arange(5, dtype=np.int32)]]
    found = [key_of_inputs(tmp_path, tokens, "CPU", "bf16") for _ in range(2)]
    (tmp_path / "b.txt").write_bytes(b"no part of it")
    found.append(key_of_inputs(tmp_path, tokens, "CPU", "bf16"))
    assert len(set(found)) == 1
    (tmp_path / "a.safetensors").write_bytes(b"x" * 998 + b"y")
    found.append(key_of_inputs(tmp_path, tokens, "CPU", "bf16"))
    (tmp_path / "a.safetensors").rename(tmp_path / "c.safetensors")
    found.append(key_of_inputs(tmp_path, tokens, "CPU", "bf16"))
    assert len(set(found)) == 3


def test_journals_of_other_inputs_are_cleared(tmp_path: Path) -> None:
    assert open_journals(None, "a" * 64) is None
    first = open_journals(tmp_path, "a" * 64)
    assert first is not None
    first.of_run("x").save(0, layer(0), iter([torch.ones(2)]))
    assert open_journals(tmp_path, "a" * 64) == first and first.of_run("x").num_layers() == 1
    assert first.of_run("y").num_layers() == 0
    open_journals(tmp_path, "b" * 64)
    assert first.of_run("x").num_layers() == 0
