"""Ranges of numbers in engine files, which are checked when they are decoded."""

from typing import Annotated

from msgspec import Meta

_MAX_INT32 = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
"""A count of at least 1."""
Index = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
"""A position, or a count that may be zero."""
Size = Annotated[int, Meta(ge=0, le=2**60)]
"""Bytes, or other numbers that grow with a model."""
TokenId = Annotated[int, Meta(ge=-(2**31), le=_MAX_INT32)]
"""A token id as in a checkpoint's config.json, where negative values mean none."""
