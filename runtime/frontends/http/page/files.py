"""The files of the page, with ETags."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from trtc.runtime.frontends.http.exchange import Exchange, Headers

_FOLDER = "static"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content security policy: no resources of other origins, no inline scripts or styles, no markup
made of text."""
_HEADERS: Headers = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True)
class StaticFile:
    """One file, in memory."""

    content: bytes
    content_type: bytes
    etag: bytes

    async def answer(self, exchange: Exchange) -> None:
        """Answer with the content, or with "not modified" if the browser has it."""
        headers = (*_HEADERS, (b"etag", self.etag))
        known = [tag.strip() for tag in exchange.header(b"if-none-match").split(b",")]
        if self.etag in known or b"W/" + self.etag in known:
            await exchange.begin(304, content_type=self.content_type, headers=headers)
            await exchange.end()
            return
        await exchange.answer(200, self.content, content_type=self.content_type, headers=headers)


def page_files() -> dict[str, StaticFile]:
    """The files by name."""
    return {
        one.name: _static_file(one.name, one.read_bytes())
        for one in files(__package__).joinpath(_FOLDER).iterdir()
        if PurePath(one.name).suffix in _TYPES
    }


def _static_file(name: str, content: bytes) -> StaticFile:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return StaticFile(content, _TYPES[PurePath(name).suffix], etag.encode())
