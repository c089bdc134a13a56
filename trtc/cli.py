"""The `trtc` command: a literal table of subcommands, each imported only when it is called."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import click

from trtc.protos.errors import EnvironmentFault, RequestError, TrtcError
from trtc.protos.signals import SignalExit, signals_as_exceptions
from trtc.runtime.host.interpreter import quick_start
from trtc.version import __version__

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""


class Subcommand(NamedTuple):
    """A row of `trtc --help`. The module `trtc.commands.<name>` exposes `command`."""

    help: str
    extra: str = ""
    """The optional dependency set that the command needs ("" when plain trtc is enough)."""
    runs_engines: bool = False
    """Whether its process does little else."""


SUBCOMMANDS: dict[str, Subcommand] = {
    "build": Subcommand("Compile a checkpoint into an engine.", extra="build"),
    "families": Subcommand("List the architectures that trtc builds.", extra="build"),
    "compile": Subcommand("Compile a TensorRT bundle into its plan, on a GPU host."),
    "tune": Subcommand("Measure a CUDA engine's fastest kernels, on its GPU."),
    "package": Subcommand("Make a model of a Triton server of engines."),
    "sign": Subcommand("Sign an engine with a private key.", extra="sign"),
    "verify": Subcommand("Verify an engine's files, and its signature.", extra="sign"),
    "inspect": Subcommand("Show what an engine is made of."),
    "quantize": Subcommand("Quantise a checkpoint into another checkpoint.", extra="build"),
    "eval": Subcommand("Measure an engine's accuracy on a text."),
    "compare": Subcommand("Say where two engines of one model part."),
    "generate": Subcommand("Complete a prompt with an engine, in this process.", runs_engines=True),
    "chat": Subcommand("Talk with an engine or a server's model.", runs_engines=True),
    "run": Subcommand("Answer one prompt with an engine or a server's model.", runs_engines=True),
    "serve": Subcommand("Serve engines over gRPC and the OpenAI API.", runs_engines=True),
    "keys": Subcommand("Make, list and revoke API keys of a server's tenants."),
    "client": Subcommand("Complete a prompt with a running server."),
    "bench": Subcommand(
        "Measure latency and throughput of an engine or a server.", runs_engines=True
    ),
    "doctor": Subcommand("Say what this machine can build and run, and why not the rest."),
}


class LazyGroup(click.Group):
    """A group whose help needs no subcommand's module."""

    def invoke(self, ctx: click.Context) -> Any:
        """A reader of stdout that leaves early (`| head`) ends the command without a word."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)
        return result

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        return _load(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but an unknown name gets the nearest known one."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            import difflib  # where nothing is wrong, start-up does without

            near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else "`trtc --help` lists the commands"
            raise RequestError("there is no such command", field=name, remedy=remedy)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.help) for name, row in SUBCOMMANDS.items()])


def _load(name: str) -> click.Command:
    """Import a subcommand.

    Raises:
        EnvironmentFault: this installation lacks its module.
    """
    module_name = f"trtc.commands.{name}"
    if importlib.util.find_spec(module_name) is None:
        raise EnvironmentFault(
            "this installation does not have the command", field=name, remedy="Install trtc again"
        )
    with quick_start() if SUBCOMMANDS[name].runs_engines else nullcontext():
        command = importlib.import_module(module_name).command
    assert isinstance(command, click.Command)
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtc", message="%(prog)s %(version)s")
@click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,  # read by main, which alone reports errors
    help="On an error, show where it was raised.",
)
def cli() -> None:
    """Compile large language models ahead of time, then serve them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; never raises for a known error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with signals_as_exceptions():
            status = cli.main(arguments, prog_name="trtc", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _report(_as_request_error(error), arguments)
    except TrtcError as error:
        return _report(error, arguments)
    except ModuleNotFoundError as error:
        return _report(_missing_package(error, arguments), arguments)
    except (KeyboardInterrupt, click.Abort):
        click.echo("trtc: interrupted", err=True)
        return EXIT_INTERRUPTED
    except SignalExit as error:
        click.echo(f"trtc: {error.word}", err=True)
        return error.exit_code
    # Without standalone mode click returns the status given to Context.exit, or the callback's.
    return status if isinstance(status, int) else 0


def _as_request_error(error: click.ClickException) -> RequestError:
    """What click refuses, in the words of every other refusal."""
    command = ""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        command = error.ctx.command_path
    field = ""
    if isinstance(error, click.BadParameter) and error.param is not None:
        field = error.param.opts[0] if error.param.opts else ""
        field = field if field.startswith("-") else error.param.human_readable_name
        problem = "is missing" if isinstance(error, click.MissingParameter) else error.message
    elif isinstance(error, click.NoSuchOption):
        field, problem = error.option_name, "there is no such option"
        if error.possibilities:
            names = ", ".join(sorted(error.possibilities))
            return RequestError(problem, field=field, remedy=f"Did you mean {names}?")
    else:
        problem = error.format_message()
    remedy = f"`{command} --help` lists the options" if command else ""
    return RequestError(problem.rstrip("."), field=field, remedy=remedy)


def _missing_package(error: ModuleNotFoundError, arguments: Sequence[str]) -> TrtcError:
    """What the user can do about an absent optional package; an absent module of trtc is a bug."""
    command = next((argument for argument in arguments if argument in SUBCOMMANDS), "")
    extra = SUBCOMMANDS[command].extra if command else ""
    if not extra or error.name is None or error.name.split(".")[0] == "trtc":
        raise error
    return EnvironmentFault(
        f"needs the package {error.name}, which is not installed",
        field=command,
        remedy=f"pip install 'trtc[{extra}]'",
    )


def _report(error: TrtcError, arguments: Sequence[str]) -> int:
    if "--traceback" in arguments:
        import traceback  # where nothing is wrong, start-up does without

        traceback.print_exception(error)
    click.echo(f"trtc: error: {' '.join(str(error).split())}", err=True)
    return error.exit_code


def _silence_stdout() -> None:
    """Whoever read stdout has gone: keep the interpreter from flushing into the closed pipe."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


if __name__ == "__main__":
    sys.exit(main())
