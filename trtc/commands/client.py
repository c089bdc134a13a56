"""`trtc client`: one completion from a running server."""

import json
from pathlib import Path

import click

from trtc.protos.errors import RequestError
from trtc.runtime.client import Client, ClientTls, GenerateOptions, Generation
from trtc.runtime.completion import Result


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--model", default="", help="Engine name; may be left out when there is one.")
@click.option("--prompt", help="Text to complete.")
@click.option("--prompt-ids", metavar="ID,ID,...", help="Token ids to complete.")
@click.option(
    "--chat", is_flag=True, help="Send the prompt as a user's message, in the chat template."
)
@click.option("--system", help="With --chat: a system message before it.")
@click.option("--max-tokens", type=int, help="New tokens; as many as fit when left out.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Draw among this many likeliest; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Draw among this share of probability.")
@click.option("--min-p", type=float, default=0.0, help="Least share of the likeliest's.")
@click.option("--repetition-penalty", type=float, default=1.0)
@click.option("--presence-penalty", type=float, default=0.0)
@click.option("--frequency-penalty", type=float, default=0.0)
@click.option("--seed", type=int, help="Same seed, same tokens.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens.")
@click.option("--n", type=int, default=1, help="Sequences to draw.")
@click.option("--logprobs", type=int, help="Show log-probabilities of this many likeliest.")
@click.option("--priority", type=int, default=0, help="Larger is sooner.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds in all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="PEM roots: use TLS.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="PEM certificate, for mTLS.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM key of --tls-cert.")
def command(
    host: str,
    port: int,
    prompt: str | None,
    prompt_ids: str | None,
    chat: bool,
    system: str | None,
    stop: tuple[str, ...],
    timeout: float | None,
    as_json: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    **options: object,
) -> None:
    """Complete a prompt with a running server, as `trtc generate` does in this process."""
    if (prompt is None) == (prompt_ids is None):
        raise RequestError("give exactly one of them", field="--prompt, --prompt-ids")
    if system is not None and not chat:
        raise RequestError("needs --chat", field="--system")
    if chat and prompt is None:
        raise RequestError("needs --prompt", field="--chat")
    tls = ClientTls(tls_ca, tls_cert, tls_key) if tls_ca or tls_cert or tls_key else None
    given = GenerateOptions(stop=stop, **options)  # type: ignore[typeddict-item]
    with Client(f"{host}:{port}", tls=tls, timeout=timeout) as client:
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt or ""})
            generation = client.chat(messages, **given)
        elif prompt is not None:
            generation = client.generate(prompt, **given)
        else:
            generation = client.generate(_token_ids(prompt_ids or ""), **given)
        with generation:
            _show(generation, as_json=as_json)


def _show(generation: Generation, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(generation.result().as_json()))
        return
    streamed = False
    for output in generation:
        # Several sequences at once would interleave: only the first streams.
        if output.index == 0 and output.text:
            click.echo(output.text, nl=False)
            streamed = True
    result = generation.result()
    _show_rest(result, streamed=streamed)


def _show_rest(result: Result, *, streamed: bool) -> None:
    """What could not be streamed: token ids of engines without text, and sequences after the
    first."""
    if not streamed and not result.text:
        click.echo(",".join(str(token) for token in result.token_ids), nl=False)
    click.echo()
    for completion in result.completions[1:]:
        click.echo(f"--- {completion.index}")
        click.echo(completion.text or ",".join(str(token) for token in completion.token_ids))


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(
            f"{text[:80]!r} is not a list of token ids",
            field="--prompt-ids",
            remedy="Give whole numbers with commas between them: 5,17,9",
        ) from error
