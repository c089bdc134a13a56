"""Writes docs/cli.md from the commands' own declarations: `python -m tests.support.cli_page`."""

from collections.abc import Iterator
from pathlib import Path

import click

from trtc.cli import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, SUBCOMMANDS, cli
from trtc.protos.errors import TrtcError

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_INTRODUCTION = """\
# The command line

This page is generated: `python -m tests.support.cli_page` writes it, and a test compares it with
the commands. `trtc COMMAND --help` prints the same. `trtc --traceback COMMAND ...` shows where an
error was raised.
"""
_OTHER_CODES = {
    0: "Success.",
    1: "An unexpected error, with a traceback.",
    EXIT_INTERRUPTED: "Interrupted from the keyboard (SIGINT).",
    EXIT_BROKEN_PIPE: "The reader of standard output closed it.",
}
_MEANINGS = {
    "UserError": "The input is wrong: options, checkpoint, calibration text or output directory. "
    "Errors in the use of options have this status as well.",
    "AccuracyError": "The quantised model missed its accuracy budget (`--max-kl`).",
    "EngineError": "The engine is damaged, or does not fit this trtc or this machine.",
    "EnvironmentFault": "This machine lacks something: a package, a compiler, a GPU, memory.",
    "ServeError": "A server refused or failed a request.",
    "InvariantError": "A bug in trtc.",
}


def page() -> str:
    """The whole page, in Markdown."""
    sections = [_INTRODUCTION, "\n".join(_exit_codes())]
    context = click.Context(cli, info_name="trtc")
    for name, row in SUBCOMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        sections.append("\n".join(_command(name, row.help, command, context)))
    return "\n".join(sections)


def _exit_codes() -> Iterator[str]:
    codes = dict(_OTHER_CODES) | {
        one.exit_code: _MEANINGS[one.__name__] for one in _classes(TrtcError) if _sets_code(one)
    }
    yield from ("## Exit status", "", "| status | meaning |", "|---|---|")
    for code, meaning in sorted(codes.items()):
        yield f"| {code} | {meaning} |"
    yield ""


def _classes(root: type[TrtcError]) -> Iterator[type[TrtcError]]:
    for one in root.__subclasses__():
        yield one
        yield from _classes(one)


def _sets_code(error: type[TrtcError]) -> bool:
    return "exit_code" in vars(error)


def _command(
    name: str, summary: str, command: click.Command, parent: click.Context
) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"## trtc {name}", "", summary, "", "```", f"trtc {name} {usage}", "```", "")
    rows = [
        record
        # Without --help, which all have: click keeps it as whoever asked first saw it.
        for parameter in command.params
        if isinstance(parameter, click.Option)
        and (record := parameter.get_help_record(context)) is not None
    ]
    yield from ("| option | meaning |", "|---|---|")
    for option, meaning in rows:
        yield f"| `{_cell(option)}` | {_cell(meaning)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
