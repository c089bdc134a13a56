"""One row of a request's tensors, as Python values."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError


class Row:
    """Row `index` of every tensor; records under which name each field was sent."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]], index: int) -> None:
        self._tensors = tensors
        self._index = index
        self.sent_as = {"deadline": "timeout"}
        """Field of a draft -> name of the input, or of the request's parameter."""

    def name_field(self, field: str, name: str) -> None:
        self.sent_as[field] = name

    def array(self, name: str) -> NDArray[Any] | None:
        """The row of an input, without the batch axis; None: it was not sent."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor[self._index]

    def value(self, *names: str, field: str = "") -> Any:
        """The only value of an input that may have several names; None: it was not sent.

        Args:
            field: of the draft, where it is not called by the first name.

        Raises:
            InvalidRequestError: it was sent under two names, or has several values.
        """
        sent = [name for name in names if name in self._tensors]
        if not sent:
            return None
        name = sent[0]
        if len(sent) > 1:
            raise InvalidRequestError(
                f"is sent as {sent[1]} too", field=name, remedy="Send one of the two"
            )
        self.name_field(field or names[0], name)
        values = self.values(name)
        if len(values) != 1:
            raise InvalidRequestError(f"has {len(values)} values", field=name, remedy="Send one")
        return values[0]

    def size(self, name: str) -> int:
        """Number of values of an input; 0 if it was not sent."""
        array = self.array(name)
        return 0 if array is None else array.size

    def values(self, name: str, limit: int | None = None) -> list[Any]:
        """The first `limit` values of an input, or all; none if it was not sent."""
        array = self.array(name)
        return [] if array is None else array.reshape(-1)[:limit].tolist()

    def texts(self, name: str, field: str = "") -> list[str]:
        """All values of an input of strings.

        Raises:
            InvalidRequestError: one is not UTF-8.
        """
        if name in self._tensors:
            self.name_field(field or name, name)
        try:
            return [value.decode() for value in self.values(name)]
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"is not UTF-8 ({error.reason})", field=name, remedy="Send text as UTF-8"
            ) from error

    def word_list(self, name: str, field: str) -> list[Sequence[int]]:
        """Words of token ids from [2, L]: concatenated tokens, and the end of each word.

        Raises:
            InvalidRequestError: the ends are not ascending or out of range.
        """
        array = self.array(name)
        if array is None:
            return []
        self.name_field(field, name)
        tokens, ends = array.tolist()
        ends = [end for end in ends if end != -1]  # padding
        begins = [0, *ends[:-1]]
        if any(not begin <= end <= len(tokens) for begin, end in zip(begins, ends, strict=False)):
            raise InvalidRequestError(
                f"has the word ends {ends} in {len(tokens)} tokens",
                field=name,
                remedy="Send [2, L]: the tokens of all words, and where each word ends",
            )
        words = [tokens[begin:end] for begin, end in zip(begins, ends, strict=False)]
        return [word for word in words if word]
