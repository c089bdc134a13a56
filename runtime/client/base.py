"""The common part of both clients: outputs of a call, and timeouts."""

from trtc.protos.errors import RequestError, TrtcError
from trtc.runtime.requests.generating import BaseGeneration, Generating, GenerationT
from trtc.runtime.requests.request import Output
from trtc.runtime.wire.messages import output_from_wire
from trtc.runtime.wire.methods import GENERATE


class RemoteGeneration(BaseGeneration):
    """Outputs of a call. After it is cancelled, reads raise CancelledError."""

    def __init__(self, request_id: str, address: str) -> None:
        super().__init__(request_id)
        self._address = address

    def _take(self, message: bytes) -> Output:
        """Parse the output in a message; an invalid one ends the request."""
        try:
            output = output_from_wire(GENERATE.parse(message))
        except TrtcError:
            self.cancel()
            raise
        self._collector.add(output)
        return output


class BaseClient(Generating[GenerationT]):
    """Makes requests; subclasses send calls and wait for them."""

    def __init__(self, address: str, timeout: float | None, api_key: str | None) -> None:
        """
        Raises:
            RequestError: the key cannot be sent in a header.
        """
        self.address = address
        self._timeout = timeout
        self._metadata = () if api_key is None else (("authorization", f"Bearer {_sent(api_key)}"),)

    def _seconds(self, timeout: float | None) -> float | None:
        """Timeout of a call; None: no limit."""
        return self._timeout if timeout is None else timeout


def _sent(api_key: str) -> str:
    if not api_key or not all("!" <= one <= "~" for one in api_key):
        raise RequestError(
            "is empty, or has characters that no key has",
            field="api_key",
            remedy="Give the key as `trtc keys` printed it",
        )
    return api_key
