"""Signatures vouch for a whole engine, made and verified by OpenSSF's library and its own tool."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.manifests import write_engine
from tests.tamper.support import replace_file, reseal
from trtc.cli import main
from trtc.protos.errors import EngineCorruptError, EngineUntrustedError
from trtc.protos.manifest import SIGNATURE_FILE, read_manifest
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.opening import open_handle
from trtc.runtime.integrity.signature import sign_engine, signed_manifest

pytest.importorskip("model_signing")


def make_key(folder: Path, name: str, curve: str = "P-256") -> tuple[Path, Path]:
    """A private and a public key, as PEM files."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    kinds = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1()}
    key = ec.generate_private_key(kinds[curve])
    private, public = folder / f"{name}.key", folder / f"{name}.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_key(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    """Only files and a manifest: signatures have nothing to do with what is in them."""
    engine = write_engine(tmp_path / "engine", {"plan.json": "{}", "tokenizer/a.json": "{}"})
    sign_engine(engine, keys[0])
    return engine


def test_sign_and_verify_from_the_command_line(
    tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = write_engine(tmp_path / "engine", {"plan.json": "{}"})
    assert main(["verify", str(engine)]) == 0
    assert "no signature was verified" in capsys.readouterr().out
    assert main(["sign", str(engine), "--key", str(keys[0])]) == 0
    assert main(["verify", str(engine), "--trust", str(keys[1]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == {"digest": read_manifest(engine).digest, "files": 1, "signed": True}


def test_any_key_of_a_directory_is_trusted(signed: Path, keys: tuple[Path, Path]) -> None:
    _, other = make_key(keys[1].parent, "another", "P-384")
    assert signed_manifest(signed, (other, keys[1])) == read_manifest(signed)
    assert main(["verify", str(signed), "--trust", str(keys[1].parent)]) == 0


def test_the_librarys_own_tool_verifies_it(signed: Path, keys: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key"]
    command += [str(signed / "manifest.json"), "--signature", str(signed / SIGNATURE_FILE)]
    found = subprocess.run(
        [*command, "--public_key", str(keys[1])], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr


def test_a_signature_of_the_librarys_own_tool_is_taken(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    engine = write_engine(tmp_path / "engine", {"plan.json": "{}"})
    command = [sys.executable, "-m", "model_signing", "sign", "key", str(engine / "manifest.json")]
    command += ["--private_key", str(keys[0]), "--signature", str(engine / SIGNATURE_FILE)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    assert signed_manifest(engine, (keys[1],)) == read_manifest(engine)


def verify(engine: Path, key: Path) -> None:
    """Through the server's own door: nothing of the engine is opened by a refusal."""
    source = EngineSource("engine", engine)
    open_handle(source, EngineConfig(trust=key))


def test_another_key_does_not_do(signed: Path, tmp_path: Path) -> None:
    _, other = make_key(tmp_path, "other")
    with pytest.raises(EngineUntrustedError, match="no trusted key has signed"):
        verify(signed, other)


def test_a_changed_file_is_found_by_its_hash(
    signed: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (signed / "plan.json").write_text("[]")
    assert main(["verify", str(signed), "--trust", str(keys[1])]) == EngineCorruptError.exit_code
    assert "sha256" in capsys.readouterr().err


def test_mended_digests_do_not_help(signed: Path, keys: tuple[Path, Path]) -> None:
    replace_file(signed, "plan.json", b"[]")
    assert main(["verify", str(signed)]) == 0
    with pytest.raises(EngineUntrustedError, match="no trusted key"):
        verify(signed, keys[1])


def test_a_changed_manifest_is_refused(signed: Path, keys: tuple[Path, Path]) -> None:
    reseal(signed, lambda document: document["model"].update(name="other"))
    with pytest.raises(EngineUntrustedError, match="no trusted key"):
        verify(signed, keys[1])


def test_a_signature_of_another_engine_is_refused(
    signed: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    other = write_engine(tmp_path / "other", {"plan.json": "[1]"})
    shutil.copy(signed / SIGNATURE_FILE, other / SIGNATURE_FILE)
    with pytest.raises(EngineUntrustedError, match="no trusted key"):
        verify(other, keys[1])


def test_without_a_signature_an_engine_is_refused(signed: Path, keys: tuple[Path, Path]) -> None:
    (signed / SIGNATURE_FILE).unlink()
    with pytest.raises(EngineUntrustedError, match="no signature"):
        verify(signed, keys[1])


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff" * 99, b'{"dsseEnvelope": 1}'])
def test_a_bundle_of_garbage_is_one_error(
    signed: Path, content: bytes, keys: tuple[Path, Path]
) -> None:
    (signed / SIGNATURE_FILE).write_bytes(content)
    with pytest.raises(EngineUntrustedError):
        verify(signed, keys[1])


def test_a_truncated_or_altered_bundle_never_passes(signed: Path, keys: tuple[Path, Path]) -> None:
    path = signed / SIGNATURE_FILE
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, len(whole) // 20):
        path.write_bytes(whole[:end])
        with pytest.raises(EngineUntrustedError):
            verify(signed, keys[1])
    bundle = json.loads(whole)
    for part in ("payload", "payloadType", "signatures"):
        document = json.loads(whole)
        document["dsseEnvelope"][part] = bundle["dsseEnvelope"]["payload"][::-1]
        path.write_text(json.dumps(document))
        with pytest.raises(EngineUntrustedError):
            verify(signed, keys[1])


@pytest.mark.parametrize("command", ["sign", "verify"])
def test_a_file_that_is_no_key_is_one_line(
    command: str, signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.pem").write_text("no key")
    option = {"sign": "--key", "verify": "--trust"}[command]
    for path in (tmp_path / "no.pem", tmp_path / "none.pem"):
        assert main([command, str(signed), option, str(path)]) in (2, 4)
        assert capsys.readouterr().err.count("\n") == 1


def test_without_the_library_the_remedy_is_named(
    signed: Path,
    keys: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    serve = ["serve", str(signed), "--require-signature", "--trust", str(keys[1])]
    for command in (
        ["sign", str(signed), "--key", str(keys[0])],
        ["verify", str(signed), "--trust", str(keys[1])],
        [*serve, "--grpc-port", "0", "--no-http"],
    ):
        assert main(command) == 5
        assert "pip install 'trtc[sign]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--require-signature"], "--trust KEYS"),
        (["--trust", "k.pem"], "--require-signature"),
        (["--digest", "abc"], "64 hexadecimal digits"),
        (["--digest", "other=" + "a" * 64], "names no engine"),
        (["--digest", "a" * 64, "--digest", "b" * 64], "given twice"),
    ],
)
def test_contradictory_options_are_refused(
    options: list[str], said: str, signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(signed), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_pinned_digest_admits_one_engine_only(signed: Path, pristine: Path) -> None:
    digest = read_manifest(pristine).digest
    for path, refused in ((pristine, False), (signed, True)):
        source = EngineSource("engine", path, digest=digest)
        config = EngineConfig(num_threads=1, kv_bytes=1 << 22)
        if refused:
            with pytest.raises(EngineUntrustedError, match="digest"):
                open_handle(source, config)
        else:
            handle = open_handle(source, config)
            handle.loop.stop()
            handle.close()
