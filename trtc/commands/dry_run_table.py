"""What `trtc build --dry-run` prints."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trtc.builder.dry_run import DryRun


def dry_run_table(found: DryRun) -> RenderableType:
    """A line each, for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _rows(found):
        table.add_row(name, Text(value))
    return table


def _rows(found: DryRun) -> list[tuple[str, str]]:
    parameters = f"{found.num_parameters / 1e9:.2f} billion parameters"
    per_sequence = f"{found.kv_of_sequence / 1e6:.1f} MB"
    rows = [
        ("model", f"{found.model}, {found.architecture}, {found.num_layers} layers, {parameters}"),
        ("made of", ", ".join(found.features) or "what Llama has"),
        ("tensors", _tensors(found)),
        ("scheme", f"{found.scheme}, KV cache {found.kv_dtype}"),
        ("weights", f"{found.weights / 1e9:.2f} GB"),
        (
            "KV cache",
            f"{found.kv_of_token:,} bytes a token; {per_sequence} a sequence of "
            f"{found.max_seq_len:,} tokens",
        ),
    ]
    if found.least_weights is not None:
        rows.insert(5, ("recipes from", f"{found.least_weights / 1e9:.2f} GB"))
    for gigabytes, tokens in found.tokens_beside_weights.items():
        room = f"room for about {tokens:,} tokens of KV cache" if tokens else "too small"
        rows.append((f"GPU of {gigabytes} GB", room))
    return [*rows, *((one.target, one.reason or "builds") for one in found.verdicts)]


def _tensors(found: DryRun) -> str:
    if not found.checked_tensors:
        return "not checked: config.json alone was read"
    unknown = len(found.unknown_tensors)
    return "names and shapes fit" + (f"; {unknown} others are left out" if unknown else "")
