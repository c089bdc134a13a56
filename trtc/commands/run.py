"""`trtc run`: one answer of a model."""

import sys
from typing import Any

import click

from trtc.commands.completion import Generation, sampling_options
from trtc.commands.model_name import OpenModel, model_options, open_model
from trtc.commands.screen import Screen
from trtc.commands.talk.answers import Answer, write_answer
from trtc.commands.talk.lines import piped_text
from trtc.commands.talk.settings import SETTINGS
from trtc.protos.errors import RequestError


@click.command()
@click.argument("name")
@click.argument("prompt", required=False)
@click.option("--system", help="The system message.")
@sampling_options
@model_options
def command(name: str, prompt: str | None, system: str | None, **options: Any) -> None:
    """Answer PROMPT with NAME: an engine directory, or a model of a running server.

    What is piped in stands before PROMPT, or is the prompt. A model without a chat template
    completes it.
    """
    settings = {one: value for one in SETTINGS if (value := options.pop(one)) is not None}
    text = _prompt(prompt)
    screen = Screen()
    with open_model(name, **options) as model:
        generation = _ask(model, text, system, settings)
        write_answer(generation, Answer(), screen.answer)
        screen.say()


def _prompt(given: str | None) -> str:
    piped = "" if sys.stdin is None or sys.stdin.isatty() else piped_text()
    parts = [part for part in (piped.rstrip("\n"), given) if part]
    if not parts:
        raise RequestError(
            "is missing",
            field="PROMPT",
            remedy="Give it, or pipe it in; `trtc chat NAME` is a conversation",
        )
    return "\n\n".join(parts)


def _ask(model: OpenModel, text: str, system: str | None, settings: dict[str, Any]) -> Generation:
    if model.info.has_chat_template:
        before = [] if system is None else [{"role": "system", "content": system}]
        messages = [*before, {"role": "user", "content": text}]
        return model.completer.chat(messages, model=model.name, **settings)
    if system is not None:
        raise RequestError(f"{model.info.name} has no chat template", field="--system")
    return model.completer.generate(text, model=model.name, **settings)
