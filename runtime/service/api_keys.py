"""Tenants: the file that holds the hashes of their API keys, and their limits.

    {"version": 1, "tenants": {"NAME": {"keys": [{"id": ..., "sha256": ...}], "scopes": [...],
                                        "requests_per_minute": ..., ...}}}

A key has 256 random bits, so a single SHA-256 of it can neither be inverted nor guessed. Slow
hashes are for passwords, which people choose.
"""

import hashlib
import hmac
import secrets
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from trtc.protos.errors import RequestError
from trtc.protos.files import UnreadableError, check_unique_keys, decode_json, read_file
from trtc.runtime.requests.principal import Principal, Scope, tenant
from trtc.runtime.requests.tenant_limits import TenantLimits
from trtc.runtime.requests.validation import MAX_PRIORITY

MAX_FILE_BYTES = 16 << 20
MAX_KEY_CHARACTERS = 512
"""Longer keys are refused without hashing."""
KEY_PREFIX = "trtc_"
"""Lets secret scanners and people recognise a key."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of tenants' names, which are used in log lines and labels."""
_BUCKET = 8
"""Leading characters of a hash used for the lookup; the whole hash is compared in constant time."""


_POSITIVE = msgspec.Meta(ge=1, le=2**53)
MAX_SALT_CHARACTERS = 256


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An entry of a key: its hash, not the key itself."""

    id: Annotated[str, msgspec.Meta(pattern=NAME)]
    """Id by which the key is revoked; unique in the file."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key's UTF-8 bytes."""
    created: datetime | None = None
    expires: datetime | None = None
    """Time from which on the key is refused; None: never."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tenant: its keys, scopes and the fields of `TenantLimits`."""

    keys: tuple[ApiKey, ...] = ()
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    """Scopes of its keys."""
    requests_per_minute: Annotated[int, _POSITIVE] | None = None
    tokens_per_minute: Annotated[int, _POSITIVE] | None = None
    max_streams: Annotated[int, _POSITIVE] | None = None
    max_context: Annotated[int, msgspec.Meta(ge=2, le=2**31)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    models: tuple[str, ...] | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""

    @property
    def limits(self) -> TenantLimits:
        return TenantLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_streams=self.max_streams,
            max_context=self.max_context,
            priority=self.priority,
            weight=self.weight,
            models=None if self.models is None else frozenset(self.models),
            cache_salt=self.cache_salt,
        )


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of a key file. Missing fields have their defaults."""

    tenants: dict[Annotated[str, msgspec.Meta(pattern=NAME)], Tenant]
    version: Literal[1] = 1


class _Entry(NamedTuple):
    sha256: str
    principal: Principal
    expires: datetime | None


class KeyTable:
    """Finds the tenant of a key."""

    def __init__(self, document: KeyFile) -> None:
        self._buckets: defaultdict[str, list[_Entry]] = defaultdict(list)
        for name, one in document.tenants.items():
            principal = tenant(name, frozenset(one.scopes), one.limits)
            for key in one.keys:
                entry = _Entry(key.sha256, principal, key.expires)
                self._buckets[key.sha256[:_BUCKET]].append(entry)

    def find(self, key: str) -> Principal | None:
        """The tenant of a key; None: the key is unknown or has expired. The timing of the lookup
        depends on a hash of the key only, which reveals nothing of other keys."""
        if len(key) > MAX_KEY_CHARACTERS:
            return None
        presented = hash_of(key)
        for entry in self._buckets.get(presented[:_BUCKET], ()):
            if hmac.compare_digest(entry.sha256, presented):
                is_over = entry.expires is not None and entry.expires <= datetime.now(UTC)
                return None if is_over else entry.principal
        return None


def make_key() -> str:
    """A new key, of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(256 // 8)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def read_keys(path: Path) -> KeyFile:
    """Read a key file.

    Raises:
        RequestError: it cannot be read, or has another form; the message names the place.
    """
    try:
        content = read_file(path, MAX_FILE_BYTES)
    except UnreadableError as error:
        raise _bad_file(path, str(error)) from error
    return parse_keys(content, path)


def parse_keys(content: bytes, path: Path) -> KeyFile:
    """Parse the content of a key file; raises the errors of `read_keys`, which name `path`."""
    try:
        check_unique_keys(content)
        document = decode_json(content, KeyFile)
    except UnreadableError as error:
        raise _bad_file(path, str(error)) from error
    keys = [key for one in document.tenants.values() for key in one.keys]
    for kind in ("id", "sha256"):
        if (twice := _first_twice([getattr(key, kind) for key in keys])) is not None:
            raise _bad_file(path, f"two keys have the {kind} {twice}")
    for key in keys:
        if key.expires is not None and key.expires.tzinfo is None:
            raise _bad_file(path, f"the time at which the key {key.id} expires has no time zone")
    return document


def _bad_file(path: Path, problem: str) -> RequestError:
    return RequestError(
        problem,
        field=str(path),
        remedy="`trtc keys` writes such files; docs/network.md describes their fields",
    )


def _first_twice(values: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
