"""Answers of no dialect: a JSON object with a `status`."""

import json
from http import HTTPStatus

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.asgi import error_headers, http_status
from trtc.runtime.frontends.http.exchange import Exchange, Headers


async def answer_plainly(
    exchange: Exchange, status: HTTPStatus, document: dict[str, object], headers: Headers = ()
) -> None:
    """Answer with a JSON object."""
    await exchange.answer(status, json.dumps(document).encode() + b"\n", headers=headers)


async def refuse_plainly(exchange: Exchange, error: TrtcError) -> None:
    """Answer with an error."""
    document: dict[str, object] = {"status": str(error)}
    await answer_plainly(exchange, http_status(error), document, error_headers(error))
