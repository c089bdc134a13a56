"""The `trtc` group: help without imports, errors as one line, exit statuses, pipes and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

import trtc.cli
from trtc.cli import SUBCOMMANDS, cli, main
from trtc.protos import errors
from trtc.version import __version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trtc {__version__}\n"


def test_help_lists_every_subcommand_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, trtc.cli\n"
        "assert trtc.cli.main(['--help']) == 0\n"
        "heavy = {'grpc', 'numpy', 'torch', 'onnx', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not [name for name in sys.modules if name.startswith('trtc.commands.')]\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in SUBCOMMANDS:
        assert f"  {name} " in result.stdout


_COUNT_THREADS = """
import os
from click.testing import CliRunner
from trtc.cli import cli
assert CliRunner().invoke(cli, [{command!r}, "--help"]).exit_code == 0
import numpy
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one thread anyway")
@pytest.mark.parametrize(
    ("command", "environment", "is_one"),
    [
        ("generate", {}, True),
        ("serve", {}, True),
        ("bench", {}, True),
        ("generate", {"OPENBLAS_NUM_THREADS": "2"}, False),
        ("doctor", {}, False),
    ],
)
def test_commands_that_run_engines_start_no_threads_for_products(
    command: str, environment: dict[str, str], is_one: bool
) -> None:
    inherited = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    result = subprocess.run(
        [sys.executable, "-c", _COUNT_THREADS.format(command=command)],
        capture_output=True,
        text=True,
        check=True,
        env=inherited | environment,
    )
    assert (int(result.stdout) == 1) == is_one


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_an_unknown_subcommand_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["brew"]) == 2
    err = capsys.readouterr().err
    assert err == "trtc: error: brew: there is no such command. `trtc --help` lists the commands\n"


def test_a_misspelt_subcommand_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["biuld"]) == 2
    assert "Did you mean 'build'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build"], "--model: is missing"),
        (["build", "--modle", "m"], "--modle: there is no such option. Did you mean --model"),
        (["serve", "e", "--grpc-port", "99999"], "--grpc-port: 99999 is not in the range"),
        (["inspect"], "ENGINE: is missing. `trtc inspect --help` lists the options"),
    ],
)
def test_what_click_refuses_is_one_line_as_all_else(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("trtc: error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        (["build", "--dtype"], "int4_g", ["int4_g64", "int4_g32", "int4_gptq"]),
        (["build", "--target"], "cuda:sm_9", ["cuda:sm_90"]),
        (["build", "--kv-dtype"], "", ["fp32", "bf16", "fp8", "int8", "int4"]),
        (["quantize", "--dtype"], "fp", ["fp8", "fp8_dynamic"]),
        ([], "insp", ["inspect"]),
    ],
)
def test_shells_complete_values(words: list[str], last: str, expected: list[str]) -> None:
    complete = ShellComplete(cli, {}, "trtc", "_TRTC_COMPLETE")
    assert [item.value for item in complete.get_completions(words, last)] == expected


def test_weights_that_no_checkpoint_holds_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.json"
    site = "model.layers.0.mlp.down_proj"
    recipe.write_text(json.dumps({"trtc_recipe": 1, "sites": {site: "iq4_g16"}}))
    asked = ["quantize", "--model", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*asked, "--dtype", "iq4"]) == main([*asked, "--recipe", str(recipe)])
    err = capsys.readouterr().err
    assert "--dtype: no checkpoint layout" in err and "has iq4 weights" in err
    assert f"--recipe: {site}: no checkpoint layout" in err and "has iq4_g16 weights" in err


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "--colour"]) == 2
    assert "--colour" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.RequestError("is wrong", field="--x", remedy="Mend it"), 2),
        (errors.AccuracyError("too far off"), 3),
        (errors.EngineCorruptError("one\nflipped\nbyte"), 4),
        (errors.EnvironmentFault("no compiler"), 5),
        (errors.UnavailableError("gone"), 6),
        (errors.InvariantError("a bug"), 70),
    ],
)
def test_an_error_is_one_line_and_its_exit_status(
    error: errors.TrtcError,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(trtc.cli, "_load", lambda name: command)
    assert main(["build"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"trtc: error: {' '.join(str(error).split())}\n"


def test_traceback_shows_where_it_was_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def command() -> None:
        raise errors.RequestError("is wrong")

    monkeypatch.setattr(trtc.cli, "_load", lambda name: command)
    assert main(["--traceback", "build"]) == 2
    assert "in command" in capsys.readouterr().err


def test_an_absent_builder_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def command() -> None:
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

    monkeypatch.setattr(trtc.cli, "_load", lambda name: command)
    assert main(["build"]) == 5
    assert "pip install 'trtc[build]'" in capsys.readouterr().err


def test_an_absent_module_of_trtc_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise ModuleNotFoundError("No module named 'trtc.x'", name="trtc.x")

    monkeypatch.setattr(trtc.cli, "_load", lambda name: command)
    with pytest.raises(ModuleNotFoundError):
        main(["build"])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import sys, trtc.cli, click\n"
        "@click.command()\n"
        "def command():\n"
        "    while True: click.echo('x' * 1000)\n"
        "trtc.cli._load = lambda name: command\n"
        "sys.exit(trtc.cli.main(['build']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=20) == 141


def test_ctrl_c_says_so_and_leaves_130() -> None:
    code = (
        "import sys, time, trtc.cli, click\n"
        "@click.command()\n"
        "def command():\n"
        "    click.echo('started')\n"
        "    time.sleep(60)\n"
        "trtc.cli._load = lambda name: command\n"
        "sys.exit(trtc.cli.main(['build']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it puts into the background with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == "\ntrtc: interrupted\n"


@pytest.mark.parametrize("name", list(SUBCOMMANDS))
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"Usage: trtc {name}" in capsys.readouterr().out
