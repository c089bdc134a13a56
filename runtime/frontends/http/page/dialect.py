"""The routes of the page: its files, which are public, and its data."""

from collections.abc import Sequence

from trtc.runtime.frontends.http.page.files import page_files
from trtc.runtime.frontends.http.page.status import Status
from trtc.runtime.frontends.http.plain import refuse_plainly
from trtc.runtime.frontends.http.routes import Handler, Route
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.service import Service

STATUS = "/trtc/status"
FILES = "/trtc/page/"


def page(service: Service) -> Sequence[Route]:
    """The routes of `/`, of its files and of the status document."""
    files = page_files()
    status = Status(service)
    return (
        _reading("/", files.pop("index.html").answer),
        *(_reading(f"{FILES}{name}", one.answer) for name, one in files.items()),
        _reading(STATUS, status.answer, Scope.METRICS),
    )


def _reading(path: str, handler: Handler, scope: Scope | None = None) -> Route:
    return Route(path, {"GET": handler}, refuse_plainly, scope, is_probe=True)
