"""HTTP/1.1 by hand: what no client library would send, and answers as they lie on the wire."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """In OpenAI's shape."""
        return self.document["error"]


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a JSON body; `headers` come beside those that it needs."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def exchange(port: int, request: bytes) -> Answer:
    """Send a request, and read until the server closes or has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        async with asyncio.timeout(30):
            writer.write(request)
            return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer of a connection: of known length, or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(first.split()[1]), headers, body)
