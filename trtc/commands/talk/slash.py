"""The `/` commands of a conversation, one row each."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtc.commands.screen import Screen
from trtc.commands.talk.dialogue import Dialogue
from trtc.commands.talk.lines import QUOTES
from trtc.commands.talk.settings import DEFAULT, SETTINGS, read_setting
from trtc.protos.errors import RequestError
from trtc.runtime.requests.model_info import ModelInfo

_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
END = "bye"


@dataclass(frozen=True)
class Place:
    """What a command acts on."""

    dialogue: Dialogue
    screen: Screen
    info: ModelInfo


@dataclass(frozen=True)
class SlashCommand:
    usage: str
    help: str
    run: Callable[[Place, str], None]


def read_command(line: str) -> tuple[str, str] | None:
    """A command's name and what follows it; None: the line is said to the model.

    Raises:
        RequestError: there is no such command.
    """
    found = _COMMAND.fullmatch(line.rstrip())
    if found is None:
        return None
    name, rest = found[1], (found[2] or "").strip()
    if name not in COMMANDS:
        raise RequestError(
            "there is no such command",
            field=f"/{name}",
            remedy="/help lists them; a line that begins with a space is said to the model",
        )
    return name, rest


def _help(place: Place, rest: str) -> None:
    width = max(len(one.usage) for one in COMMANDS.values())
    for one in COMMANDS.values():
        place.screen.say(f"{one.usage:{width}}  {one.help}")
    place.screen.say()
    place.screen.say(f"{QUOTES} begins and ends a message of several lines.")
    place.screen.say("Ctrl-C stops an answer, Ctrl-D ends the conversation.")


def _system(place: Place, rest: str) -> None:
    if rest:
        place.dialogue.system = rest
    else:
        place.screen.say(place.dialogue.system or "There is no system message.")


def _set(place: Place, rest: str) -> None:
    settings = place.dialogue.settings
    name, _, value = rest.partition(" ")
    if not name:
        width = max(map(len, SETTINGS))
        for one, setting in SETTINGS.items():
            place.screen.say(f"{one:{width}}  {settings.get(one, DEFAULT)}  ({setting.meaning})")
    elif value.strip() == DEFAULT and name in SETTINGS:
        settings.pop(name, None)
    else:
        settings[name] = read_setting(name, value.strip())


def _show(place: Place, rest: str) -> None:
    info, dialogue = place.info, place.dialogue
    for name, value in {
        "model": info.name,
        "engine": f"{info.family}, {info.scheme}, {info.target}",
        "digest": info.engine_digest,
        "context": f"{info.max_seq_len} tokens",
        "system": dialogue.system or "",
        "messages": str(len(dialogue.said)),
        "settings": ", ".join(f"{key}={value}" for key, value in dialogue.settings.items()),
    }.items():
        place.screen.say(f"{name:8}  {value or 'none'}")


def _clear(place: Place, rest: str) -> None:
    place.dialogue.clear()


def _save(place: Place, rest: str) -> None:
    place.dialogue.save(_path(rest, "/save"))


def _load(place: Place, rest: str) -> None:
    place.dialogue.load(_path(rest, "/load"))
    place.screen.say(f"{len(place.dialogue.said)} messages")


def _stats(place: Place, rest: str) -> None:
    if place.dialogue.last is None:
        place.screen.say("There is no answer yet.")
        return
    for line in place.dialogue.last.lines():
        place.screen.say(line)


def _bye(place: Place, rest: str) -> None:
    """Whoever reads the lines ends with this one."""


def _path(text: str, command: str) -> Path:
    if not text:
        raise RequestError("is missing", field="FILE", remedy=f"Write {command} FILE")
    return Path(text).expanduser()


COMMANDS: Mapping[str, SlashCommand] = {
    "help": SlashCommand("/help", "This list.", _help),
    "system": SlashCommand("/system [TEXT]", "Show or replace the system message.", _system),
    "set": SlashCommand(
        "/set [NAME VALUE]", f"Show or change a setting; the value {DEFAULT} resets it.", _set
    ),
    "show": SlashCommand("/show", "What the model is, and what is set.", _show),
    "clear": SlashCommand("/clear", "Forget what was said, but for the system message.", _clear),
    "save": SlashCommand("/save FILE", "Write the messages, as JSON.", _save),
    "load": SlashCommand("/load FILE", "Go on with messages that were saved.", _load),
    "stats": SlashCommand("/stats", "Tokens and speed of the last answer.", _stats),
    END: SlashCommand(f"/{END}", "End.", _bye),
}
