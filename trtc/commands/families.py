"""`trtc families`: what architectures trtc builds, and for which targets."""

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """List the architectures that trtc builds, by their names in config.json."""
    from trtc.builder.family_support import family_rows

    rows = family_rows()
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("architecture", "targets", "made of, beside what Llama has"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.architecture, ", ".join(row.targets), ", ".join(row.features))
    Console().print(table)
