"""`trtc keys`: the file of API keys that `trtc serve --api-keys` reads."""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import msgspec

from trtc.protos.errors import OutputError, RequestError
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.api_keys import (
    ApiKey,
    KeyFile,
    Tenant,
    hash_of,
    make_key,
    parse_keys,
    read_keys,
)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--add", metavar="TENANT", help="Make a key of this tenant and print it, once.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice([scope.value for scope in Scope]),
    help="With --add: what all keys of the tenant open. Default: inference for a new tenant, no "
    "change for a known one.",
)
@click.option(
    "--expires-days",
    type=click.IntRange(1, 36500),
    help="With --add: days for which the key is taken. Default: until it is revoked.",
)
@click.option("--revoke", metavar="ID", help="Remove the key of this id.")
def command(
    file: Path,
    add: str | None,
    scopes: tuple[str, ...],
    expires_days: int | None,
    revoke: str | None,
) -> None:
    """List the keys of FILE, make one or remove one. FILE holds hashes only."""
    if add is not None and revoke is not None:
        raise RequestError("give one of them", field="--add, --revoke")
    if add is None and (scopes or expires_days is not None):
        raise RequestError(
            "has no effect alone",
            field="--scope" if scopes else "--expires-days",
            remedy="Give --add TENANT as well",
        )
    if add is not None:
        with _alone(file):
            _add(file, add, tuple(Scope(one) for one in scopes), expires_days)
    elif revoke is not None:
        with _alone(file):
            _revoke(file, revoke)
    else:
        _list(read_keys(file))


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Of two commands that change a file at once, one waits: neither undoes the other."""
    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputError(
            f"its directory cannot be opened ({error.strerror})",
            field=str(file),
            remedy="Choose another place",
        ) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _add(file: Path, name: str, scopes: tuple[Scope, ...], expires_days: int | None) -> None:
    document = read_keys(file) if file.exists() else KeyFile(tenants={})
    now = datetime.now(UTC).replace(microsecond=0)
    expires = None if expires_days is None else now + timedelta(days=expires_days)
    secret = make_key()
    key = ApiKey(secrets.token_hex(4), hash_of(secret), created=now, expires=expires)
    tenant = document.tenants.get(name, Tenant())
    tenant = msgspec.structs.replace(
        tenant, keys=(*tenant.keys, key), scopes=scopes or tenant.scopes
    )
    _write(file, KeyFile(tenants={**document.tenants, name: tenant}))
    click.echo(secret)
    click.echo(f"key {key.id} of {name}: shown this once, {file} holds its hash", err=True)


def _revoke(file: Path, key_id: str) -> None:
    document = read_keys(file)
    tenants = {
        name: msgspec.structs.replace(
            tenant, keys=tuple(key for key in tenant.keys if key.id != key_id)
        )
        for name, tenant in document.tenants.items()
    }
    if tenants == document.tenants:
        raise RequestError(
            f"no key of {file} has the id {key_id}",
            field="--revoke",
            remedy=f"`trtc keys {file}` lists them",
        )
    _write(file, KeyFile(tenants=tenants))
    click.echo(f"revoked {key_id}", err=True)


def _list(document: KeyFile) -> None:
    for name, tenant in document.tenants.items():
        opens = ",".join(scope.value for scope in tenant.scopes)
        for key in tenant.keys:
            created = f" created={_day(key.created)}" if key.created is not None else ""
            expires = f" expires={_day(key.expires)}" if key.expires is not None else ""
            click.echo(f"{name} id={key.id} scopes={opens}{created}{expires}")


def _day(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write(file: Path, document: KeyFile) -> None:
    """Whole or not at all: a server may read it at any time."""
    text = json.dumps(msgspec.to_builtins(document), indent=2) + "\n"
    parse_keys(text.encode(), file)
    place = file.resolve()
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=place.parent, prefix=f".{file.name}.", delete=False
        ) as new:
            new.write(text)
            new.flush()
            if place.exists():
                _keep_access(new.fileno(), place.stat())
            os.fsync(new.fileno())
        Path(new.name).replace(place)
    except OSError as error:
        raise OutputError(
            f"cannot write it ({error.strerror})", field=str(file), remedy="Choose another place"
        ) from error


def _keep_access(descriptor: int, before: os.stat_result) -> None:
    """Keep owner and mode: the server may run as another user than the one who makes keys."""
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    with contextlib.suppress(PermissionError):  # only root gives files away
        os.fchown(descriptor, before.st_uid, before.st_gid)
