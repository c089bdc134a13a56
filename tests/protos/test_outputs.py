"""A quantised checkpoint appears whole or not at all."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from trtc.protos.errors import OutputError
from trtc.protos.outputs import new_directory
from trtc.quant.record import CHECKPOINT, write_record


def write(directory: Path, text: str) -> None:
    (directory / "hf_quant_config.json").write_text(text)
    write_record(directory, "0", {})


def test_new_directory_appears_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    with new_directory(output, CHECKPOINT, force=False) as directory:
        write(directory, "new")
        assert not output.exists()
    assert (output / "hf_quant_config.json").read_text() == "new"
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        new_directory(tmp_path / "out", CHECKPOINT, force=False) as directory,
    ):
        write(directory, "half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match="exists already"),
        new_directory(tmp_path, CHECKPOINT, force=False),
    ):
        pytest.fail("entered")


def test_force_replaces_a_quantised_checkpoint(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    write(output, "old")
    with new_directory(output, CHECKPOINT, force=True) as directory:
        write(directory, "new")
        assert (output / "hf_quant_config.json").read_text() == "old"
    assert (output / "hf_quant_config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    write(output, "old")
    with pytest.raises(KeyError), new_directory(output, CHECKPOINT, force=True):
        raise KeyError
    assert (output / "hf_quant_config.json").read_text() == "old"


def test_force_does_not_replace_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with (
        pytest.raises(OutputError, match="not a quantised checkpoint"),
        new_directory(tmp_path, CHECKPOINT, force=True),
    ):
        pytest.fail("entered")
    assert (tmp_path / "thesis.txt").exists()


def test_force_does_not_replace_another_toolkits_checkpoint(tmp_path: Path) -> None:
    """modelopt itself writes hf_quant_config.json, and its users add files of their own."""
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with (
        pytest.raises(OutputError, match=r"no trtc_quantization\.json that trtc wrote"),
        new_directory(tmp_path, CHECKPOINT, force=True),
    ):
        pytest.fail("entered")


def test_empty_directory_is_no_obstacle(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with new_directory(output, CHECKPOINT, force=False) as directory:
        write(directory, "new")
    assert (output / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_said_clearly(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(OutputError, match="the disk is full"),
        new_directory(tmp_path / "out", CHECKPOINT, force=False),
    ):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match="cannot be written"),
        new_directory(tmp_path / "file" / "out", CHECKPOINT, force=False),
    ):
        pytest.fail("entered")


def test_failure_takes_back_the_parents_it_made(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with (
        pytest.raises(KeyError),
        new_directory(tmp_path / "kept" / "deep" / "deeper" / "out", CHECKPOINT, force=False),
    ):
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_a_directory_may_be_written_beside_another(tmp_path: Path) -> None:
    output = tmp_path / "all" / "one"
    with new_directory(output, CHECKPOINT, force=False, beside=tmp_path / "all") as directory:
        write(directory, "new")
        assert list((tmp_path / "all").iterdir()) == []
    assert (output / "hf_quant_config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["all"]
