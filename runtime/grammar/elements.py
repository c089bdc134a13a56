"""Formats of structural tags, as they are written: `structural_tag` reads them."""

from typing import Any

Element = dict[str, Any]
"""A format, as JSON has it."""


def const(text: str) -> Element:
    return {"type": "const_string", "value": text}


def sequence(*elements: Element) -> Element:
    return {"type": "sequence", "elements": list(elements)}


def optional(content: Element) -> Element:
    return {"type": "optional", "content": content}


def either(*elements: Element) -> Element:
    """At least one is given."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}
