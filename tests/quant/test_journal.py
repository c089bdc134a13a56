"""Calibrations that were killed: they go on where they were, and make the same bytes."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.quant.test_calibrate import HELDOUT, calibration_ids, wide_checkpoint
from tests.support.torch_gpu import needs_torch_gpu
from trtc.protos.errors import CalibrationError
from trtc.protos.kv import KvDType
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Progress, Step
from trtc.protos.staging import Staging, staging
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.calibration_facts import CalibrationFacts
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


@dataclass(frozen=True)
class Case:
    """A calibration that can be run several times."""

    model: Path
    text: Path
    scheme: str
    kv_dtype: KvDType = "bf16"

    def write(self, output: Path, progress: Progress, journal: Path | None) -> CalibrationFacts:
        return quantize_checkpoint(
            self.model,
            SCHEMES[self.scheme],
            self.kv_dtype,
            self.text,
            output,
            progress,
            HELDOUT,
            journal=journal,
        )

    def run(self, output: Path, journal: Path | None) -> "Run":
        steps: list[Step] = []
        facts = self.write(output, steps.append, journal)
        files = {path.name: path.read_bytes() for path in output.iterdir()}
        layers = [step.done for step in steps if step.unit == "layers" and step.done != step.total]
        return Run(facts, files, layers)

    def stop(self, work: Staging, error: BaseException) -> None:
        """Raise an error when the first layer is in the journal."""

        def progress(step: Step) -> None:
            if step.done == 1:
                while not list(work.journal.rglob("streams-00000.safetensors")):
                    time.sleep(0.01)  # it is written meanwhile
                raise error

        self.write(work.scratch, progress, work.journal)


@dataclass(frozen=True)
class Run:
    """A calibration that has ended."""

    facts: CalibrationFacts
    files: dict[str, bytes]
    calibrated: list[int | None]
    """Layers, in their order."""

    def check_same(self, other: "Run") -> None:
        assert self.facts == other.facts
        assert sorted(self.files) == sorted(other.files)
        for name, content in self.files.items():
            assert other.files[name] == content, name


def test_a_killed_calibration_goes_on_and_makes_the_same_bytes(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    case, journal = Case(*inputs, "iq4"), tmp_path / "journal"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *inputs, tmp_path / "killed", journal],
        env=environment,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    resumed = case.run(tmp_path / "resumed", journal)
    assert resumed.calibrated == [1], "a layer was there"
    case.run(tmp_path / "whole", None).check_same(resumed)


@pytest.mark.parametrize("scheme", ["fp8", "int4_awq"])
def test_an_interrupted_calibration_by_modelopt_goes_on_and_makes_the_same_bytes(
    scheme: str, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    case, place = Case(*inputs, scheme, "f8e4m3"), tmp_path / "place"
    with pytest.raises(KeyboardInterrupt), staging(place / "engine") as work:
        case.stop(work, KeyboardInterrupt())
    with staging(place / "engine") as work:
        others = replace(case, kv_dtype="bf16").run(tmp_path / "others", work.journal)
        assert others.calibrated == [0, 1], "the settings are others"
        resumed = case.run(tmp_path / "resumed", work.journal)
        assert resumed.calibrated == [1], "a layer was there"
        read = case.run(tmp_path / "read", work.journal)
        assert not read.calibrated, "all layers were there"
    assert not any(place.iterdir())
    whole = case.run(tmp_path / "whole", None)
    whole.check_same(resumed)
    whole.check_same(read)


def test_a_calibration_that_fails_leaves_nothing(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "place"
    with pytest.raises(CalibrationError), staging(place / "engine") as work:
        Case(*inputs, "fp8").stop(work, CalibrationError("fails"))
    assert not place.exists()


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
    if device == "cuda":
        needs_torch_gpu()
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


@pytest.mark.parametrize("scheme", ["iq4", "fp8"])
def test_an_error_of_writing_is_that_of_the_calibration(
    scheme: str, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread it comes from, and before another layer is written."""
    written: list[int] = []

    def refuse(journal: Journal, index: int, *given: object) -> None:
        written.append(index)
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(Journal, "save", refuse)
    with pytest.raises(OSError, match="the disk is full"):
        Case(*inputs, scheme).run(tmp_path / "out", tmp_path / "journal")
    assert written == [0]


def test_a_key_is_of_every_byte_of_the_checkpoint_and_of_the_text(tmp_path: Path) -> None:
    for name, content in (("a.safetensors", b"x" * 999), ("config.json", b"{}"), ("b.txt", b"?")):
        (tmp_path / name).write_bytes(content)
    tokens = [[np.arange(5, dtype=np.int32)]]
    others = [[np.arange(1, 6, dtype=np.int32)]]
    found = [key_of_inputs(tmp_path, tokens, "CPU", "bf16") for _ in range(2)]
    assert key_of_inputs(tmp_path, others, "CPU", "bf16") not in found
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
