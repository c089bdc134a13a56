"""Signatures of engines: OpenSSF model signing with keys, a DSSE envelope in a Sigstore bundle.

The signature is of `manifest.json`, which has the hash of every other file: a valid signature and
matching hashes verify the whole engine, and no large file is hashed twice. The library gets a copy
of the bytes that are decoded, so that the file cannot change in between.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtc.protos.errors import (
    EngineUntrustedError,
    EnvironmentFault,
    OutputError,
    RequestError,
)
from trtc.protos.files import UnreadableError, read_file
from trtc.protos.manifest import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    Manifest,
    decode_manifest,
    manifest_bytes,
)

_MAX_KEY_BYTES = 1 << 16
_MAX_SIGNATURE_BYTES = 1 << 20
_KEY_SUFFIXES = (".pem", ".pub")


def sign_engine(engine: Path, key: Path) -> Path:
    """Sign an engine's manifest; the caller must have verified the files.

    Args:
        key: PEM of an elliptic-curve private key (P-256, P-384 or P-521) without a password.

    Returns:
        The signature, which replaces an older one.

    Raises:
        RequestError: the key cannot be used.
        OutputError: the engine cannot be written to.
        EnvironmentFault: the library is not installed.
    """
    content, private_key = manifest_bytes(engine), _read_key(key, "--key")
    with _library(), _copies({MANIFEST_FILE: content, "key": private_key}) as folder:
        from model_signing import signing

        made = folder / SIGNATURE_FILE
        try:
            config = signing.Config().use_elliptic_key_signer(private_key=folder / "key")
            config.sign(folder / MANIFEST_FILE, made)
        except Exception as error:
            raise RequestError(
                f"is no private key that can sign ({_reason(error)})",
                field=f"--key {key}",
                remedy="Give one without a password, as from `openssl ecparam -name prime256v1 "
                "-genkey -noout`",
            ) from error
        signature = made.read_bytes()
    _replace(engine / SIGNATURE_FILE, signature)
    return engine / SIGNATURE_FILE


def trusted_keys(path: Path) -> tuple[Path, ...]:
    """A PEM file, or all `*.pem` and `*.pub` files of a directory.

    Raises:
        RequestError: there is no such file.
    """
    keys = [path]
    if path.is_dir():
        keys = sorted(one for one in path.iterdir() if one.suffix in _KEY_SUFFIXES)
    if not keys or not keys[0].exists():
        raise RequestError(
            "has no public key",
            field=f"--trust {path}",
            remedy="Give a PEM file, or a directory of *.pem or *.pub files",
        )
    return tuple(keys)


def signed_manifest(engine: Path, keys: Sequence[Path]) -> Manifest:
    """The manifest of an engine, if one of `keys` has signed it. Its files are not verified.

    Raises:
        EngineUntrustedError: there is no signature, or none of these keys has signed the manifest.
        EngineError: the manifest is damaged.
        RequestError: a key cannot be read.
        EnvironmentFault: the library is not installed.
    """
    content, field = manifest_bytes(engine), str(engine / SIGNATURE_FILE)
    try:
        signature = read_file(engine / SIGNATURE_FILE, _MAX_SIGNATURE_BYTES)
    except UnreadableError as error:
        raise EngineUntrustedError(
            f"the engine has no signature: {SIGNATURE_FILE} {error}",
            field=str(engine),
            remedy="Sign it with `trtc sign`, or get it from where it was signed",
        ) from error
    reasons = []
    for key in keys:
        reason = _why_not_signed(content, signature, _read_key(key, "--trust"))
        if not reason:
            return decode_manifest(engine, content)
        reasons.append(f"{key.name}: {reason}")
    raise EngineUntrustedError(
        f"no trusted key has signed this manifest ({'; '.join(reasons)[:500]})",
        field=field,
        remedy="Sign the engine again after every change, or trust the key that signed it",
    )


def _why_not_signed(content: bytes, signature: bytes, key: bytes) -> str:
    """Why the signature is not valid for this key; "": it is."""
    copies = {MANIFEST_FILE: content, SIGNATURE_FILE: signature, "key": key}
    with _library(), _copies(copies) as folder:
        from model_signing import verifying

        try:
            config = verifying.Config().use_elliptic_key_verifier(public_key=folder / "key")
            config.verify(folder / MANIFEST_FILE, folder / SIGNATURE_FILE)
        except Exception as error:  # noqa: BLE001 (bundles are hostile; the library has no base error)
            return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _read_key(path: Path, option: str) -> bytes:
    try:
        return read_file(path, _MAX_KEY_BYTES)
    except UnreadableError as error:
        raise RequestError(str(error), field=f"{option} {path}") from error


@contextlib.contextmanager
def _library() -> Iterator[None]:
    """Context manager that reports a missing library in one line, and keeps its output off
    stdout."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"need the package {error.name}, which is not installed",
            field="signatures",
            remedy="pip install 'trtc[sign]'",
        ) from error


@contextlib.contextmanager
def _copies(files: dict[str, bytes]) -> Iterator[Path]:
    """Context manager: a private directory with these files."""
    with tempfile.TemporaryDirectory(prefix="trtc-signature-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        yield Path(folder)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"cannot be written to ({error.strerror})",
            field=str(path.parent),
            remedy="Sign a copy, or make it writable",
        ) from error
