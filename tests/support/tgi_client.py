"""The unmodified InferenceClient of `huggingface_hub` over the HTTP port of a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from huggingface_hub import AsyncInferenceClient

from tests.support.servers import RunningServer


@asynccontextmanager
async def tgi_client(server: RunningServer) -> AsyncIterator[AsyncInferenceClient]:
    url = f"http://127.0.0.1:{server.http_port}"
    # Where the hub may not be asked, the client asks nobody at all.
    with patch("huggingface_hub.constants.HF_HUB_OFFLINE", False):
        async with AsyncInferenceClient(
            base_url=url, provider="hf-inference", token=None, timeout=30
        ) as client:
            yield client
