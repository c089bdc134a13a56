"""The file of API keys: whose key it is, and what is wrong with a file."""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos.errors import RequestError
from trtc.runtime.requests.principal import Scope, tenant
from trtc.runtime.service.api_keys import (
    MAX_KEY_CHARACTERS,
    ApiKey,
    KeyFile,
    KeyTable,
    Tenant,
    hash_of,
    make_key,
    parse_keys,
    read_keys,
)


def table(*keys: ApiKey, scopes: tuple[Scope, ...] = (Scope.INFERENCE,)) -> KeyTable:
    return KeyTable(KeyFile(tenants={"alice": Tenant(keys=keys, scopes=scopes)}))


def test_a_key_is_found_by_its_hash_alone() -> None:
    secret = make_key()
    assert hash_of(secret) == hashlib.sha256(secret.encode()).hexdigest()
    keys = table(ApiKey("a", hash_of(secret)), ApiKey("b", hash_of("other")))
    assert keys.find(secret) == keys.find("other") == tenant("alice")
    assert keys.find(hash_of(secret)) is None


@given(st.text(max_size=600))
def test_nothing_else_is_a_key(presented: str) -> None:
    secret = "trtc_" + "x" * 43
    assert (table(ApiKey("a", hash_of(secret))).find(presented) is not None) == (
        presented == secret
    )


def test_hashes_that_begin_alike_are_told_apart() -> None:
    secret = make_key()
    digest = hash_of(secret)
    alike = digest[:8] + "0" * 56
    keys = KeyTable(
        KeyFile(
            tenants={
                "bob": Tenant(keys=(ApiKey("b", alike),)),
                "alice": Tenant(keys=(ApiKey("a", digest),)),
            }
        )
    )
    assert keys.find(secret) == tenant("alice")


def test_keys_are_long_random_and_different() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {len("trtc_") + 43}


def test_a_key_of_a_megabyte_is_not_hashed() -> None:
    long = "x" * (MAX_KEY_CHARACTERS + 1)
    assert table(ApiKey("a", hash_of(long))).find(long) is None


def test_a_key_ends_at_its_time() -> None:
    soon, past = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, -1))
    keys = table(
        ApiKey("a", hash_of("now"), expires=soon), ApiKey("b", hash_of("old"), expires=past)
    )
    assert keys.find("now") is not None
    assert keys.find("old") is None


def test_a_written_document_is_read_again() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    one = Tenant(keys=(ApiKey("a", hash_of("x"), now, now),), scopes=(Scope.METRICS,))
    document = KeyFile(tenants={"alice": one, "bob": Tenant()})
    assert parse_keys(msgspec.json.encode(document), Path("x")) == document


KEY = {"id": "a", "sha256": hash_of("x")}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "Expected `object`"),
        ({}, "`tenants`"),
        ({"version": 2, "tenants": {}}, "version"),
        ({"tenants": {}, "tenant": {}}, "unknown field `tenant`"),
        ({"tenants": {"a b": {}}}, "regex"),
        ({"tenants": {"a": {"keys": [{"id": "a", "sha256": "xyz"}]}}}, "sha256"),
        ({"tenants": {"a": {"keys": [{"id": "a", "key": "secret"}]}}}, "`key`"),
        ({"tenants": {"a": {"scopes": ["everything"]}}}, "scopes"),
        ({"tenants": {"a": {"keys": [KEY, {**KEY, "id": "b"}]}}}, "two keys have the sha256"),
        (
            {"tenants": {"a": {"keys": [KEY]}, "b": {"keys": [{**KEY, "sha256": "0" * 64}]}}},
            "two keys have the id a",
        ),
        (
            {"tenants": {"a": {"keys": [{**KEY, "expires": "2026-01-01T00:00:00"}]}}},
            "no time zone",
        ),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_place(
    document: Any, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RequestError, match=said) as caught:
        read_keys(path)
    assert caught.value.field == str(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"tenants":{},"tenants":{}}', b"\xff", b"[" * 9999]
)
def test_a_file_that_is_no_json_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError):
        parse_keys(content, Path("keys.json"))
