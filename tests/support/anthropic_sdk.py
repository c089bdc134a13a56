"""The unmodified `anthropic` SDK over the HTTP port of a server."""

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from tests.support.servers import RunningServer


def anthropic_sdk(
    server: RunningServer, api_key: str = "none", *, max_retries: int = 0
) -> AsyncAnthropic:
    """A client that asks once, unless it retries."""
    return AsyncAnthropic(
        base_url=f"http://127.0.0.1:{server.http_port}",
        api_key=api_key,
        max_retries=max_retries,
        timeout=30,
        http_client=DefaultAsyncHttpxClient(verify=False),  # authorities take long to read
    )
