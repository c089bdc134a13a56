"""What both clients are but for their waiting: outputs as they come, and the limits of calls."""

from trtc.protos.errors import RequestError, TrtcError
from trtc.runtime.requests.generating import BaseGeneration, Generating, GenerationT
from trtc.runtime.requests.request import Output
from trtc.runtime.wire.messages import output_from_wire
from trtc.runtime.wire.methods import GENERATE


class RemoteGeneration(BaseGeneration):
    """Outputs of a call. Once it is cancelled, reading on raises CancelledError."""

    def __init__(self, request_id: str, address: str) -> None:
        super().__init__(request_id)
        self._address = address

    def _take(self, message: bytes) -> Output:
        """The output in a message; one that cannot be read ends the request."""
        try:
            output = output_from_wire(GENERATE.parse(message))
        except TrtcError:
            self.cancel()
            raise
        self._collector.add(output)
        return output


class BaseClient(Generating[GenerationT]):
    """Makes requests; how a call is sent and waited for is the client's own."""

    def __init__(self, address: str, timeout: float | None, api_key: str | None) -> None:
        """
        Raises:
            RequestError: the key cannot be sent in a header.
        """
        self.address = address
        self._timeout = timeout
        self._metadata = () if api_key is None else (("authorization", f"Bearer {_sent(api_key)}"),)

    def _seconds(self, timeout: float | None) -> float | None:
        """A call's limit; None: none."""
        return self._timeout if timeout is None else timeout


def _sent(api_key: str) -> str:
    if not api_key or not all("!" <= one <= "~" for one in api_key):
        raise RequestError(
            "is empty, or has characters that no key has",
            field="api_key",
            remedy="Give the key as `trtc keys` printed it",
        )
    return api_key
