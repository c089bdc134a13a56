"""Ranges of numbers in engine files, so that decoding refuses what no engine has."""

from typing import Annotated

from msgspec import Meta

_MAX_INT32 = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
"""Of things of which there is at least one."""
Index = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
"""A position, or a count that may be zero."""
Size = Annotated[int, Meta(ge=0, le=2**60)]
"""Bytes, or other numbers that grow with a model."""
TokenId = Annotated[int, Meta(ge=-(2**31), le=_MAX_INT32)]
"""As in a checkpoint's config.json, where negative ones mean that there is none."""
