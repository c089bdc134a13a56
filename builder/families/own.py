"""A family of the user's own: a function in a Python file."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from trtc.builder.families.config import Config, shown
from trtc.builder.families.spec_check import check_spec
from trtc.builder.spec import DecoderSpec
from trtc.protos.errors import RequestError, TrtcError

FUNCTION = "family"
Family = Callable[[Config, int], DecoderSpec]
_FIELD = "--family"


def load_family(path: Path) -> Family:
    """The function `family(config, max_seq_len)` of a Python file, which is run.

    What it returns is checked before anything is made of it.

    Raises:
        RequestError: there is no such file or function, or running the file fails.
    """
    if not path.is_file():
        raise RequestError("there is no such file", field=f"{_FIELD} {path}")
    spec = importlib.util.spec_from_file_location("trtc_own_family", path)
    if spec is None or spec.loader is None:
        raise RequestError(
            "is not a Python file", field=f"{_FIELD} {path}", remedy="Name it FILE.py"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failure(path, error) from error
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise RequestError(
            f"has no function {FUNCTION}(config, max_seq_len)",
            field=f"{_FIELD} {path}",
            remedy="See docs/families.md",
        )

    def family(config: Config, max_seq_len: int) -> DecoderSpec:
        try:
            found = function(config, max_seq_len)
        except TrtcError:
            raise
        except Exception as error:
            raise _failure(path, error) from error
        if not isinstance(found, DecoderSpec):
            raise RequestError(
                f"{FUNCTION} returns {shown(found)}, not a DecoderSpec", field=f"{_FIELD} {path}"
            )
        check_spec(found, f"{_FIELD} {path}")
        return found

    return family


def _failure(path: Path, error: Exception) -> RequestError:
    text = " ".join(str(error).split())[:200]
    return RequestError(f"{type(error).__name__}: {text}", field=f"{_FIELD} {path}")
