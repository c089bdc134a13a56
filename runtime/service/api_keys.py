"""API keys of tenants: the file that holds their hashes.

    {"version": 1, "tenants": {"NAME": {"keys": [{"id": ..., "sha256": ...}], "scopes": [...]}}}

A key is 256 random bits, so a single SHA-256 of it can neither be inverted nor guessed: slow hashes
are for passwords, which people choose.
"""

import hashlib
import hmac
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trtc.protos.errors import RequestError
from trtc.protos.files import UnreadableError, check_unique_keys, decode_json, read_file
from trtc.runtime.requests.principal import Principal, Scope, tenant

MAX_FILE_BYTES = 16 << 20
MAX_KEY_CHARACTERS = 512
"""Longer ones are refused unread."""
KEY_PREFIX = "trtc_"
"""For scanners of secrets, and for people who find one."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Of tenants: a word in log lines and labels."""
_BUCKET = 8
"""Characters of a hash by which it is looked up; the rest is compared in constant time."""


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key, without the key."""

    id: Annotated[str, msgspec.Meta(pattern=NAME)]
    """For people, to revoke it; unique in the file."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Of the key's UTF-8 bytes."""
    created: datetime | None = None
    expires: datetime | None = None
    """Refused from then on; None: never."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    keys: tuple[ApiKey, ...] = ()
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    """What its keys open."""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document. Fields that are left out have their defaults."""

    tenants: dict[Annotated[str, msgspec.Meta(pattern=NAME)], Tenant]
    version: Literal[1] = 1


@dataclass(frozen=True)
class _Entry:
    sha256: str
    principal: Principal
    expires: datetime | None


class KeyTable:
    """Finds the tenant of a key."""

    def __init__(self, document: KeyFile) -> None:
        self._buckets: defaultdict[str, list[_Entry]] = defaultdict(list)
        for name, one in document.tenants.items():
            principal = tenant(name, frozenset(one.scopes))
            for key in one.keys:
                entry = _Entry(key.sha256, principal, key.expires)
                self._buckets[key.sha256[:_BUCKET]].append(entry)

    def find(self, key: str) -> Principal | None:
        """None: nobody's, or its time is over. What the time of the answer tells is about a hash
        of the key, which says nothing of keys."""
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
    """The document of a file.

    Raises:
        RequestError: it cannot be read, or is not of this form; the message names the place.
    """
    try:
        content = read_file(path, MAX_FILE_BYTES)
    except UnreadableError as error:
        raise _bad_file(path, str(error)) from error
    return parse_keys(content, path)


def parse_keys(content: bytes, path: Path) -> KeyFile:
    """The document that `content` is; errors as of `read_keys`, which name `path`."""
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
