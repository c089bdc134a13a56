"""`trtc chat`: a conversation with a model, at the terminal."""

from typing import Any

import click

from trtc.commands.completion import sampling_options
from trtc.commands.model_name import OpenModel, model_options, open_model
from trtc.commands.screen import Screen
from trtc.commands.talk.dialogue import Dialogue
from trtc.commands.talk.lines import line_editing, piped_messages, typed_messages
from trtc.commands.talk.loop import talk
from trtc.commands.talk.settings import SETTINGS
from trtc.protos.errors import RequestError


@click.command()
@click.argument("name", default="")
@click.option("--system", help="The system message.")
@sampling_options
@model_options
@click.option("--no-history", is_flag=True, help="Keep nothing of what is typed.")
def command(name: str, system: str | None, no_history: bool, **options: Any) -> None:
    """Talk with NAME: an engine directory, or a model of a running server (its only one when NAME
    is left out).

    Ctrl-C stops an answer, Ctrl-D ends; /help lists what else there is.
    """
    settings = {one: value for one in SETTINGS if (value := options.pop(one)) is not None}
    screen = Screen()
    with open_model(name, **options) as model:
        _check_template(model)
        dialogue = Dialogue(system, settings)
        if not screen.is_terminal:
            talk(model, dialogue, screen, piped_messages())
            return
        screen.hint(f"{model.info.name} ({model.info.target}). /help lists commands, Ctrl-D ends.")
        with line_editing(history=not no_history):
            talk(model, dialogue, screen, typed_messages(screen))


def _check_template(model: OpenModel) -> None:
    if not model.info.has_chat_template:
        raise RequestError(
            f"{model.info.name} has no chat template: it completes texts",
            field="NAME",
            remedy="Use `trtc run NAME PROMPT`",
        )
