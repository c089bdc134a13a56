"""Tests a checkpoint's tokenizer and chat template before an engine is built with them."""

from pathlib import Path

from trtc.protos.errors import CheckpointError, EngineIncompatibleError, NoTokenizerError
from trtc.protos.files import MAX_JSON_BYTES, UnreadableError, read_file
from trtc.runtime.host.limited_process import LimitedProcess, OutOfMemory, OutOfTime, ProcessEnded
from trtc.runtime.text.tokenizer import TOKENIZER_FILE, load_template

_MODULE = "trtc.runtime.text.tokenizer_check"
_PACKAGES = ("tokenizers", "msgspec")
_CPU_SECONDS = 60.0
"""The largest vocabularies load in two seconds."""
_WALL_SECONDS = 300.0
_MEMORY_BYTES = 4 << 30


def try_tokenizer(directory: Path) -> tuple[str, ...]:
    """Run tokenizer.json on texts that are hard for regular expressions, and compile the chat
    template.

    Returns notes, for example that an unusable template leaves the engine without chats.

    Raises:
        CheckpointError: tokenizer.json cannot be loaded, or does not terminate.
        EnvironmentFault: no process can be started.
    """
    path = directory / TOKENIZER_FILE
    problem = _problem_of(path)
    if problem:
        raise CheckpointError(problem, field=str(path), remedy="Download the file again")
    try:
        template = load_template(directory)
    except EngineIncompatibleError as error:
        raise CheckpointError(error.problem, field=error.field, remedy=error.remedy) from error
    if template is None:
        return ()
    try:
        template.compile()
    except NoTokenizerError as error:
        return (f"{error.problem}: the engine takes no chats",)
    finally:
        template.close()
    return ()


def _problem_of(path: Path) -> str:
    try:
        content = read_file(path, MAX_JSON_BYTES).decode("utf-8")
    except (UnreadableError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    limits = {
        "cpu_seconds": _CPU_SECONDS,
        "memory_bytes": _MEMORY_BYTES,
        "recycle_bytes": _MEMORY_BYTES,
    }
    process = LimitedProcess(_MODULE, _PACKAGES)
    try:
        answer = process.call({"tokenizer": content, "limits": limits}, _WALL_SECONDS)
    except OutOfTime:
        return f"takes more than {_CPU_SECONDS:g} seconds on a short text"
    except OutOfMemory:
        return f"takes more than {_MEMORY_BYTES >> 30} GiB of memory"
    except ProcessEnded as error:
        return f"crashes the process that tries it ({error})"
    finally:
        process.close()
    return str(answer["problem"])
