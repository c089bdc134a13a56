"""The options of commands that read a checkpoint and quantise it."""

from pathlib import Path

import click

from trtc.commands.options import together

model_options = together(
    click.option("--model", required=True, help="Checkpoint directory, or a name on the hub."),
    click.option("--revision", help="Branch, tag or commit of a model on the hub. Default: main."),
)
calibration_options = together(
    click.option(
        "--calib",
        metavar="FILE[:SHARE],...",
        help="Calibration text (.jsonl or plain), or several files and their shares of the tokens, "
        "as in a.jsonl:0.5,b.txt. Default: text that ships with trtc.",
    ),
    click.option(
        "--recipe",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A format for every site of the model, instead of --dtype: a recipe.json that a build "
        "wrote, or one written by hand.",
    ),
    click.option(
        "--keep",
        multiple=True,
        metavar="LAYER_GLOB=bf16",
        help="Do not quantise linears of these names, such as '*.layers.3.mlp.down_proj=bf16'. May "
        "be repeated.",
    ),
)
