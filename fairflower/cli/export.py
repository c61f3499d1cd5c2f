"""``fairflower export``: write a run's final model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflower.cli.options import DataDir
from fairflower.cli.terminal import friendly_errors, say_where
from fairflower.paths import check_output_file


@friendly_errors()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="onnx|torchscript|state-dict",
            help="onnx or torchscript: the model including normalization, so that it accepts raw "
            "examples. state-dict: the model's arrays for PyTorch, as safetensors.",
        ),
    ] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output file. Default: a file in the run folder."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Export a run's final model for use in other programs."""
    from fairflower.api.final_model import FORMATS
    from fairflower.api.final_model import export as write
    from fairflower.report import read_run

    if out:
        check_output_file(out, Path(FORMATS.get(format_, "")).suffix)
    say_where("model", write(read_run(run), format_, out, data_dir or ""))
