"""rfc3987_syntax, by which jsonschema checks IRIs, made when it is first asked."""

import importlib
import sys
import types


def make_iri_syntax_late() -> None:
    """jsonschema imports it, and it makes dozens of parsers: that takes as long as importing torch.
    Few tests check an IRI."""

    def is_valid_syntax(term: str, value: str) -> bool:
        if sys.modules[_NAME] is late:
            del sys.modules[_NAME]
        return bool(importlib.import_module(_NAME).is_valid_syntax(term, value))

    late = types.ModuleType(_NAME)
    vars(late)["is_valid_syntax"] = is_valid_syntax
    sys.modules[_NAME] = late


_NAME = "rfc3987_syntax"
