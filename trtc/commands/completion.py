"""What `generate` and `client` share: the options of a completion, and how it is shown."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Unpack

import click

from trtc.commands.conversation import read_conversation, read_messages
from trtc.commands.options import together
from trtc.commands.screen import shown
from trtc.protos.errors import RequestError
from trtc.protos.sampling import SAMPLING_PARAMETERS
from trtc.runtime.requests.completion import Result
from trtc.runtime.requests.generate_options import ChatOptions, GenerateOptions
from trtc.runtime.requests.request import Output
from trtc.runtime.text.template_options import Message

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

sampling_options = together(
    click.option("--max-tokens", type=int, help="New tokens; as many as fit when left out."),
    # Without defaults: what is not given is the model's to say.
    *(
        click.option(
            f"--{one.name.replace('_', '-')}",
            type=one.kind,
            help=f"{one.meaning.capitalize()}. Default: {one.default_said}.",
        )
        for one in SAMPLING_PARAMETERS
    ),
    click.option("--seed", type=int, help="Same seed, same tokens."),
)

completion_options = together(
    click.option(
        "--prompt", help=r"Text to complete; \n, \t, \r and \\ mean what they mean in Python."
    ),
    click.option("--raw", is_flag=True, help="Take backslashes in --prompt as they are."),
    click.option(
        "--prompt-file",
        type=click.File(encoding="utf-8"),
        help="Text to complete, as it is; - for standard input.",
    ),
    click.option("--prompt-ids", metavar="ID,ID,...", help="Token ids to complete."),
    click.option(
        "--chat", is_flag=True, help="Send the text as a user's message, in the chat template."
    ),
    click.option("--system", help="With --chat: a system message before it."),
    click.option(
        "--messages",
        type=click.File(encoding="utf-8"),
        help="JSON list of a conversation's messages, as in the OpenAI API; - for standard input.",
    ),
    click.option(
        "--tools",
        type=click.File(encoding="utf-8"),
        help="With --chat or --messages: JSON list of the tools' schemas.",
    ),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="With --chat or --messages: variables for the chat template, such as "
        """'{"enable_thinking": false}'.""",
    ),
    sampling_options,
    click.option(
        "--logit-bias", multiple=True, metavar="ID=BIAS", help="Add to a token's logit; repeatable."
    ),
    click.option("--stop", multiple=True, help="End before this text; repeatable."),
    click.option("--stop-token-ids", metavar="ID,ID,...", help="End at these tokens."),
    click.option("--include-stop", is_flag=True, help="Keep the stop text in the output."),
    click.option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens."),
    click.option("--min-tokens", type=int, default=0, help="New tokens before anything ends it."),
    click.option(
        "--json-schema",
        type=click.File(encoding="utf-8"),
        help="The output is a JSON document that this schema describes; - for standard input.",
    ),
    click.option("--regex", help="The output matches this regular expression as a whole."),
    click.option("--choice", multiple=True, help="The output is one of these; repeatable."),
    click.option(
        "--grammar",
        type=click.File(encoding="utf-8"),
        help="The output is of this grammar, in Lark's or GBNF's notation; - for standard input.",
    ),
    click.option(
        "--structural-tag",
        type=click.File(encoding="utf-8"),
        help="The output has parts with shapes, as this JSON document says; - for standard input.",
    ),
    click.option("--grammar-name", help="The output is of this grammar of the engine."),
    click.option("--n", type=int, default=1, help="Sequences to draw."),
    click.option("--logprobs", type=int, help="Give log-probabilities of this many likeliest."),
    click.option("--prompt-logprobs", type=int, help="The same of the prompt's own tokens."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end."),
)


class Generation(Iterator[Output], AbstractContextManager["Generation"], Protocol):
    """A completion on its way."""

    def result(self) -> Result: ...

    def cancel(self) -> None: ...


class Completer(Protocol):
    """An engine in this process, or a client of one."""

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Generation: ...


def complete(completer: Callable[[], AbstractContextManager[Completer]], **options: Any) -> None:
    """Run and show the completion that `completion_options` describe.

    Args:
        completer: opened only when the options make sense.

    Raises:
        RequestError: they do not.
    """
    prompt = _read_prompt(
        {
            "--prompt": _unescaped(options.pop("prompt"), raw=options.pop("raw")),
            "--prompt-file": _read("--prompt-file", options.pop("prompt_file")),
            "--prompt-ids": _token_ids("--prompt-ids", options.pop("prompt_ids")),
            "--messages": read_messages(_read("--messages", options.pop("messages"))),
        }
    )
    conversation = read_conversation(
        prompt,
        chat=options.pop("chat"),
        system=options.pop("system"),
        tools=_read("--tools", options.pop("tools")),
        template_kwargs=options.pop("chat_template_kwargs"),
    )
    as_json = options.pop("as_json")
    options["logit_bias"] = dict(_bias(one) for one in options["logit_bias"])
    options["stop_token_ids"] = _token_ids("--stop-token-ids", options["stop_token_ids"]) or ()
    options["json_schema"] = _read("--json-schema", options["json_schema"])
    options["grammar"] = _read("--grammar", options["grammar"])
    options["structural_tag"] = _read("--structural-tag", options["structural_tag"])
    options["choice"] = options["choice"] or None
    given: GenerateOptions = options  # type: ignore[assignment]
    with completer() as opened:
        generation = (
            opened.generate(prompt, **given)
            if conversation is None
            else opened.chat(conversation.messages, **conversation.template, **given)
        )
        with generation:
            _show(generation, as_json=as_json)


def _read_prompt(given: Mapping[str, Any]) -> Any:
    """The one that is given: a text, token ids, or a conversation's messages."""
    prompts = [prompt for prompt in given.values() if prompt is not None]
    if len(prompts) != 1:
        raise RequestError("give exactly one of them", field=", ".join(given))
    return prompts[0]


def _read(option: str, file: Any) -> str | None:
    if file is None:
        return None
    try:
        return str(file.read())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"is not UTF-8 ({error.reason} at byte {error.start})",
            field=option,
            remedy="Convert it to UTF-8",
        ) from error


def _unescaped(text: str | None, *, raw: bool) -> str | None:
    r"""Decode \n, \t, \r and \\, which a shell passes on as two characters."""
    if text is None or raw:
        return text
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)


def _token_ids(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(
            f"{text[:80]!r} is not a list of token ids",
            field=option,
            remedy="Give whole numbers with commas between them: 5,17,9",
        ) from error


def _bias(text: str) -> tuple[int, float]:
    try:
        token, bias = text.split("=")
        return int(token), float(bias)
    except ValueError as error:
        raise RequestError(
            f"{text[:80]!r} is not a token id and its bias",
            field="--logit-bias",
            remedy="Give them like this: 17=-2.5",
        ) from error


def _show(generation: Generation, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(generation.result().as_json()))
        return
    streamed = False
    for output in generation:
        # Several sequences at once would interleave: only the first streams.
        if output.index == 0 and output.text:
            click.echo(shown(output.text), nl=False)
            streamed = True
    _show_rest(generation.result(), streamed=streamed)


def _show_rest(result: Result, *, streamed: bool) -> None:
    """What could not be streamed: token ids of engines without text, and sequences after the
    first."""
    if not streamed and not result.text:
        click.echo(",".join(str(token) for token in result.token_ids), nl=False)
    click.echo()
    for completion in result.completions[1:]:
        click.echo(f"--- {completion.index}")
        text = shown(completion.text)
        click.echo(text or ",".join(str(token) for token in completion.token_ids))
