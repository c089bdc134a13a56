"""Files of API keys."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.api_keys import ApiKey, KeyFile, Tenant, hash_of


def write_keys(path: Path, tenants: Mapping[str, Tenant]) -> None:
    """Write the file, or replace it at once."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(KeyFile(tenants=dict(tenants))))
    new.replace(path)


def holding(*keys: str, scopes: tuple[Scope, ...] = (Scope.INFERENCE,)) -> Tenant:
    """A tenant with these keys."""
    return Tenant(keys=tuple(ApiKey(hash_of(one)[:8], hash_of(one)) for one in keys), scopes=scopes)
