"""Files against the manifest: whole ones by their hash, large ones chunk by chunk."""

import hashlib
from pathlib import Path
from time import sleep

import msgspec
import pytest

from tests.support.manifests import tiny_manifest
from trtc.protos.errors import EngineCorruptError, UnavailableError
from trtc.protos.manifest import CHUNK_BYTES, FileFacts, Manifest
from trtc.quant.hashing import file_facts
from trtc.runtime.integrity.verify import HashCheck, verify_files


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two chunks and a bit, sparse: only the marks are written."""
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        for mark in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4):
            file.seek(mark)
            file.write(b"x")
    return path


def manifest_of(path: Path, facts: FileFacts) -> Manifest:
    return msgspec.structs.replace(tiny_manifest(), files={path.name: facts})


def test_a_large_file_has_its_own_hash_and_those_of_its_chunks(large: Path) -> None:
    facts, content = file_facts(large), large.read_bytes()
    assert facts.bytes == len(content) == 2 * CHUNK_BYTES + 5
    assert facts.sha256 == hashlib.sha256(content).hexdigest()
    assert facts.chunks == tuple(
        hashlib.sha256(content[begin : begin + CHUNK_BYTES]).hexdigest()
        for begin in (0, CHUNK_BYTES, 2 * CHUNK_BYTES)
    )
    verify_files(large.parent, manifest_of(large, facts))


def test_a_file_of_one_chunk_is_listed_without_chunks(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    assert file_facts(tmp_path / "small").chunks == ()


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4])
def test_a_flipped_bit_in_any_chunk_is_found(large: Path, at: int) -> None:
    manifest = manifest_of(large, file_facts(large))
    with large.open("r+b") as file:
        file.seek(at)
        file.write(b"y")
    with pytest.raises(EngineCorruptError, match="sha256") as caught:
        verify_files(large.parent, manifest)
    assert caught.value.field == str(large)


def test_chunks_that_do_not_cover_the_file_are_refused(large: Path) -> None:
    """Otherwise the bytes after the last listed chunk would go unverified."""
    facts = file_facts(large)
    short = msgspec.structs.replace(facts, chunks=facts.chunks[:-1])
    with pytest.raises(EngineCorruptError, match="2 chunks"):
        verify_files(large.parent, manifest_of(large, short))


def test_a_check_of_hashes_passes_what_is_whole(large: Path) -> None:
    check = HashCheck(large.parent, manifest_of(large, file_facts(large)), [large.name])
    check.wait()
    check.raise_failure()
    check.close()
    check.close()


@pytest.mark.parametrize("at", [0, 2 * CHUNK_BYTES + 4])
def test_a_check_of_hashes_names_the_file_that_is_not(large: Path, at: int) -> None:
    manifest = manifest_of(large, file_facts(large))
    with large.open("r+b") as file:
        file.seek(at)
        file.write(b"y")
    check = HashCheck(large.parent, manifest, [large.name])
    for ask in (check.wait, check.raise_failure):
        with pytest.raises(EngineCorruptError, match="sha256") as caught:
            ask()
        assert caught.value.field == str(large)
    check.close()


def test_a_check_of_hashes_that_is_closed_hashes_no_more(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []

    def compare(engine: Path, chunk: object) -> None:
        hashed.append(chunk)
        sleep(0.2)

    monkeypatch.setattr("trtc.runtime.integrity.verify.num_usable_cores", lambda: 1)
    monkeypatch.setattr("trtc.runtime.integrity.verify._compare", compare)
    check = HashCheck(large.parent, manifest_of(large, file_facts(large)), [large.name])
    assert not hashed
    check.begin()
    check.close()
    assert len(hashed) < 3
    with pytest.raises(UnavailableError, match="before its files were verified"):
        check.wait()


def test_a_check_of_hashes_that_cannot_be_made_is_no_pass(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(engine: Path, chunk: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trtc.runtime.integrity.verify._compare", compare)
    check = HashCheck(large.parent, manifest_of(large, file_facts(large)), [large.name])
    for ask in (check.wait, check.raise_failure):
        with pytest.raises(MemoryError):
            ask()
    check.close()
