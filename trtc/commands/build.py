"""`trtc build`: a checkpoint becomes an engine."""

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from trtc.builder.request import KV_DTYPES, BuildRequest
from trtc.commands.checkpoint_options import calibration_options, model_options
from trtc.commands.phases import phases
from trtc.commands.values import one_of
from trtc.plugins.cpu.isa import ISAS
from trtc.plugins.gpu.arch import ARCHS, RTX_SMS
from trtc.protos.answer_formats import ANSWER_FORMATS
from trtc.protos.byte_size import parse_bytes
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.quant.scheme import BUILDABLE
from trtc.quant.site_format import TABLE_FORMATS

_DEFAULTS = BuildRequest(model="", output=Path())
_TARGETS = (
    "cpu",
    *(f"cpu:{isa}" for isa in ISAS),
    *(f"cuda:sm_{sm}" for sm in ARCHS),
    *(f"tensorrt:sm_{sm}" for sm in ARCHS),
    *(f"tensorrt-rtx:sm_{sm}" for sm in RTX_SMS),
)


@click.command()
@model_options
@click.option("--output", type=click.Path(path_type=Path), help="Directory of the engine.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say whether the model would build, for which targets and how large, and do nothing. "
    "--model may be a config.json; --output is not needed.",
)
@click.option(
    "--dtype",
    metavar="SCHEME",
    shell_complete=one_of(BUILDABLE),
    help=f"One of {', '.join(BUILDABLE)}. Default: bf16, or the checkpoint's own if quantised.",
)
@click.option(
    "--kv-dtype",
    metavar="TYPE",
    shell_complete=one_of(tuple(KV_DTYPES)),
    help=f"Element type of the KV pool: {', '.join(KV_DTYPES)}. Default: that of activations.",
)
@click.option(
    "--target",
    shell_complete=one_of(_TARGETS),
    help="cpu, cpu:ISA[,ISA...], cuda:sm_NN, tensorrt:sm_NN or tensorrt-rtx:sm_NN[,sm_NN...]. "
    "Default: the best for this machine.",
)
@click.option("--force", is_flag=True, help="Replace an engine that is at --output.")
@calibration_options
@click.option(
    "--eval-text",
    type=click.Path(path_type=Path),
    help="Text to measure accuracy on (.jsonl or plain). Default: text that ships with trtc.",
)
@click.option(
    "--eval-tokens",
    type=int,
    metavar="N",
    help="Tokens to measure accuracy on, spread over the text. Default: 4096. 0: do not measure.",
)
@click.option(
    "--max-kl",
    type=float,
    help="Fail above this divergence, in nats a token. Without --dtype or --recipe, find the "
    "smallest recipe that keeps to it.",
)
@click.option(
    "--max-bits",
    type=float,
    metavar="BITS",
    help="Find the best recipe that takes at most so many bits a weight, scales included.",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    help="Find the best recipe whose engine's weights take at most so much, as in 5GB or 4.5GiB; "
    "with --tp, on each GPU.",
)
@click.option(
    "--reference", metavar="MODEL", help="Unquantised checkpoint to measure a quantised one by."
)
@click.option(
    "--exact-activations",
    is_flag=True,
    help="On CPUs: multiply 4-bit and E4M3 weights with the scheme's activations, not int8 ones.",
)
@click.option(
    "--exact-lm-head",
    is_flag=True,
    help="Keep a quantised model's lm_head in bf16; otherwise it is int8 on CPUs, and beside "
    "weights of 4 and 6 bits on GPUs.",
)
@click.option(
    "--lm-head-dtype",
    metavar="FORMAT",
    shell_complete=one_of(tuple(TABLE_FORMATS)),
    help=f"One of {', '.join(TABLE_FORMATS)}, whatever --dtype is. Where embeddings are tied, of "
    "the table that both are. Default: int8_g128 on CPUs, and beside weights of 4 and 6 bits on "
    "GPUs, of a quantised model; else bf16.",
)
@click.option(
    "--embedding-dtype",
    metavar="FORMAT",
    shell_complete=one_of(tuple(TABLE_FORMATS)),
    help="The same of the table of embeddings. Default: bf16.",
)
@click.option(
    "--exact-weights",
    is_flag=True,
    help="On CPUs: keep bf16 weights in 16 bits. Otherwise they are stored in 12, which rounds "
    "weights below 2^-13 of the largest of their output channel.",
)
@click.option(
    "--dummy-weights",
    is_flag=True,
    help="Write no weights; random ones are filled in at load. Needs config.json only.",
)
@click.option(
    "--max-batch-size",
    type=int,
    default=_DEFAULTS.max_batch_size,
    show_default=True,
    help="Sequences in one step.",
)
@click.option(
    "--max-seq-len", type=int, help="Tokens of one sequence. Default: the model's, at most 4096."
)
@click.option(
    "--max-num-tokens",
    type=int,
    default=_DEFAULTS.max_num_tokens,
    show_default=True,
    help="Tokens in one step.",
)
@click.option(
    "--page-size",
    type=int,
    help="Tokens of a KV page. Default: 16, or as many as make a page as large as the states of a "
    "sequence.",
)
@click.option(
    "--format",
    "answer_format",
    metavar="NAME",
    shell_complete=one_of(tuple(ANSWER_FORMATS)),
    help=f"How the model writes thoughts and calls of tools: {', '.join(ANSWER_FORMATS)}. Default: "
    "as its chat template shows.",
)
@click.option(
    "--grammar",
    "grammars",
    multiple=True,
    metavar="NAME=[KIND:]FILE",
    help="A grammar that requests may name: a JSON schema (.json), Lark (.lark), GBNF (.gbnf) or a "
    "regular expression (.regex). KIND: json_schema, lark, regex or structural_tag. Repeatable.",
)
@click.option(
    "--tp",
    type=int,
    default=_DEFAULTS.tp,
    show_default=True,
    metavar="N",
    help="GPUs to spread the model over: 1, 2, 4 or 8. For --target cuda.",
)
@click.option(
    "--ep",
    is_flag=True,
    help="Each GPU of --tp has some of the routed experts whole, instead of its share of each.",
)
@click.option(
    "--family",
    type=click.Path(path_type=Path),
    metavar="FILE.py",
    help="Describe the model by the function family(config, max_seq_len) of this file, which is "
    "run, instead of by its architecture. See docs/families.md.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads that measure the engine.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest instead of a table.")
def command(
    threads: int | None,
    as_json: bool,
    dry_run: bool,
    grammars: tuple[str, ...],
    max_bytes: str | None,
    **options: object,
) -> None:
    """Compile a checkpoint into an engine."""
    from trtc.builder.grammar_files import parse_grammars
    from trtc.builder.pipeline import build
    from trtc.builder.report import summary
    from trtc.runtime.engine.probe import Probe

    if options["output"] is None and not dry_run:
        raise RequestError("is missing", field="--output", remedy="Give the engine's directory")
    options["output"] = options["output"] or Path()
    if max_bytes is not None:
        options["max_bytes"] = parse_bytes(max_bytes, "--max-bytes")
    request = BuildRequest(**options, grammars=parse_grammars(grammars))  # type: ignore[arg-type]
    if dry_run:
        _dry_run(request, as_json)
        return
    errors = Console(stderr=True)
    noticed: list[str] = []

    def notice(note: str) -> None:
        noticed.append(note)
        errors.print(f"note: {escape(note)}", highlight=False)

    with phases() as progress:
        result = build(request, probe=Probe(threads), progress=progress, notice=notice)
    if as_json:
        click.echo(result.manifest.to_json().decode(), nl=False)
        return
    console = Console()
    console.print(summary(result.report))
    for note in (note for note in result.report.notes if note not in noticed):
        console.print(f"note: {escape(note)}", highlight=False)
    console.print(f"built {escape(str(result.path))} in {result.seconds:.1f} s", highlight=False)


def _dry_run(request: BuildRequest, as_json: bool) -> None:
    """Print what would be built.

    Raises:
        UnsupportedError: for none of the targets that were asked.
    """
    from trtc.builder.dry_run import dry_run
    from trtc.commands.dry_run_table import dry_run_table

    found = dry_run(request)
    if as_json:
        click.echo(found.to_json())
    else:
        Console().print(dry_run_table(found))
    if not found.builds:
        raise UnsupportedError("no target would build it", field="--dry-run")
