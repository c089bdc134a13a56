"""The unmodified `ollama` client over the HTTP port of a server."""

from ollama import AsyncClient

from tests.support.servers import RunningServer


def ollama_client(server: RunningServer, api_key: str = "") -> AsyncClient:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return AsyncClient(f"http://127.0.0.1:{server.http_port}", headers=headers, timeout=30)
