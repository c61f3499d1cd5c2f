"""A run's final model: loading it, and export including the normalization of its data."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.config import RunConfig
from fairflower.config.text import unknown
from fairflower.data import Federation, prepare
from fairflower.errors import ConfigError, RunFolderError, quoted, require
from fairflower.files import Arrays, DamagedFile, replacing
from fairflower.models import set_arrays
from fairflower.registry import KINDS
from fairflower.report.reading import Run, model_file
from fairflower.server import checkpoint
from fairflower.server.checkpoint import check_same_examples, run_config
from fairflower.server.registration import recorded_sites
from fairflower.tables.encoding import Encoding
from fairflower.tables.new_rows import frame_of, new_features
from fairflower.training.build import build_model
from fairflower.training.device import choose_device

#: Export format -> name of the file in the run folder.
FORMATS = {"onnx": "model.onnx", "torchscript": "model.pt", "state-dict": "state-dict.safetensors"}

#: A model that a run has kept: that of a round, the ``"best"``, or the last (None).
Which = int | Literal["best"] | None


def load_run_model(
    run: Run, data_dir: str, device: str, which: Which = None
) -> tuple[RunConfig, Federation, nn.Module, torch.device]:
    """Return a run's config, data, model (see `load_model`) and device.

    ``data_dir`` is the data folder if it differs from the folder used in training.

    Raises
    ------
    ConfigError
        If the data are not those of the run, or the device is invalid.
    RunFolderError
        If the run has no model, or its model does not fit the config.
    DataError
        If the run's data are not on this machine.
    """
    place = {"data.dir": data_dir} if data_dir else {}
    config = run_config(run.path, {**run.config, **place})
    chosen = choose_device(device, option="--device")
    federation = prepare(config.data)
    check_same_examples(run.path, run.info, federation)
    return config, federation, load_model(run, config, federation, which).to(chosen), chosen


def kept_arrays(run: Run, which: Which = None) -> tuple[Path, Arrays]:
    """Return the file and the arrays of a model that a run has kept.

    Raises ``RunFolderError`` if there is no such model, or it is damaged, and ``ConfigError`` if
    the model of a round was not kept.
    """
    last, best = run.info["rounds"], run.info.get("best", {}).get("round")
    path = run.path / "checkpoints"
    try:
        if which in (None, "best", last, best):
            path = model_file(run, which not in (None, last))
            return path, load_file(path)
        if which in (kept := checkpoint.rounds(run.path)):
            return path, checkpoint.model_of(run.path, int(which))
    except (SafetensorError, DamagedFile) as error:
        raise RunFolderError(f"{path} is damaged ({error}).") from error
    listed = ", ".join(map(str, sorted({last, best or last, *kept})))
    raise ConfigError(
        f"round = {quoted(which)}: {run.path} has kept the models of rounds {listed}. A run keeps "
        "more with a larger checkpoint.keep."
    )


def load_model(
    run: Run, config: RunConfig, federation: Federation, which: Which = None
) -> nn.Module:
    """Load a run's final model, or another that it has kept, in eval mode.

    Raises `RunFolderError` if the run has no model or the model does not match the config.
    """
    path, arrays = kept_arrays(run, which)
    # As the clients build it: arrays that stay with them have their initial values.
    keeps = issubclass(config.client.factory, LocalArraysTrainer) and run.info.get("local_arrays")
    spec, seed = (config.model, config.seed) if keeps else (config.model.to_receive(), 0)
    model = build_model(spec, config.client, federation, seed=seed)
    try:
        set_arrays(model, arrays, config.model.name)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} does not contain a {config.model.name} for these data: {error}"
        ) from error
    return model.eval()


class Network(nn.Module):
    """A network in eval mode that accepts raw examples and normalizes them itself.

    Images are uint8 [N, C, H, W] with values from 0 to 255, and have the same channels and size as
    the run's images. Rows of a table are float32 [N, D] without normalization. Texts are token ids,
    int64 [N, L]. The output is logits [N, classes], whose softmax gives probabilities, or that of
    another task: logits of labels or pixels, or predictions of numbers and times. A new row of a
    table of text and numbers is given to `from_row`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, federation: Federation) -> None:
        super().__init__()
        self.model, self.federation = model, federation
        self.kind = KINDS[len(federation.shape)]
        sides = (1, 1) if self.kind == "images" else ()
        for name in ("mean", "std"):
            values = torch.tensor(getattr(federation, name), dtype=torch.float32)
            self.register_buffer(name, values.view(-1, *sides))
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        """Map raw examples to logits or predictions."""
        if self.kind == "images":  # the same arithmetic as in `fairflower.training.batches`
            x = x.to(torch.float32) / 255
        if self.kind != "tokens":
            x = (x - self.mean) / self.std
        return self.federation.learns.for_users(self.model(x))

    def examples(self, count: int) -> Tensor:
        """Return random examples that the model accepts; every call returns the same examples."""
        shape, random = self.federation.shape, torch.Generator().manual_seed(0)
        if self.kind == "images":
            return torch.randint(256, (count, *shape), generator=random, dtype=torch.uint8)
        if self.kind == "tokens":
            return torch.randint(shape[0], (count, *shape[1:]), generator=random)
        return torch.randn(count, *shape, generator=random) * self.std + self.mean

    def from_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prediction for a new row of a table, given by column in any order.

        For classes: ``prediction``, and the probability of each. For numbers, the unit; for times,
        the survival at each cut. Columns that the model does not use are ignored. Raises
        ``DataError`` if a column is missing that was known in all training rows, or a cell is no
        number. A level that is unknown is warned of, and counts as another one.
        """
        columns = self.from_rows(frame_of(row), "the row")
        return {name: values[0] for name, values in columns.items()}

    def from_rows(self, frame: Any, where: str, decimal: str = "") -> dict[str, list[Any]]:
        """Return predictions for rows of a table of text, a DataFrame, by heading; see above."""
        if not self.federation.encoding:
            raise ConfigError("The run's data are no table (data.name = 'table').")
        try:
            encoding = Encoding.from_json(self.federation.encoding)
        except ValueError as error:
            raise RunFolderError(f"The run's encoding is damaged: {error}") from error
        x = new_features(encoding, frame, where, decimal)
        with torch.inference_mode():
            output = self.model((torch.from_numpy(x) - self.mean) / self.std)
        named = self.federation.learns.table(output, self.federation.class_names)
        return {name: np.asarray(values).tolist() for name, values in named.items()}

    def facts(self) -> dict[str, str]:
        """Return metadata that users of the model need, as a dict of JSON texts."""
        attributes = {name: getattr(self.federation, name) for name in ("shape", "mean", "std")}
        attributes |= {"kind": self.kind, "task": self.federation.task}
        named = self.federation.learns.classes or self.federation.classes
        attributes |= {"classes": self.federation.class_names} if named else {}
        facts = {name: json.dumps(value) for name, value in attributes.items()}
        return facts | ({"encoding": text} if (text := self.federation.encoding) else {})


def network(run: Run, data_dir: str = "", which: Which = None) -> Network:
    """Load a run's model (`load_model`) on the CPU; errors are those of `load_run_model`."""
    # The sites have the data, and rows of tables are not needed: the run folder describes them.
    if kind := next((key for key in ("sites", "table") if key in run.info), ""):
        federation = recorded_sites(run.path, run.info, kind)
        config = run_config(run.path, run.config)
        return Network(load_model(run, config, federation, which), federation)
    _, federation, model, _ = load_run_model(run, data_dir, "cpu", which)
    return Network(model, federation)


def export(
    run: Run, format_: str, path: Path | None = None, data_dir: str = "", best: bool = False
) -> Path:
    """Write a run's final or best model to a file that does not require fairflower.

    ``"onnx"`` and ``"torchscript"`` export the whole `Network`, for any batch size.
    ``"state-dict"`` exports all arrays, including frozen arrays, for ``load_state_dict``, as
    safetensors. All files contain `Network.facts` as metadata. By default the file is written to
    the run folder (`FORMATS`), as ``best-model.onnx`` if it is the ``best``. An existing file is
    replaced. Returns its path.

    Raises
    ------
    ConfigError
        If the format is unknown.
    NotInstalled
        If the libraries for ONNX are missing.
    RunFolderError
        If the run has no model, or its model cannot be exported in this format.
    DataError
        If the run's data are not on this machine.
    """
    if format_ not in FORMATS:
        raise ConfigError(unknown("format", format_, FORMATS))
    if format_ == "onnx":
        require("export", "--format onnx")
    whole = network(run, data_dir, "best" if best else None)
    path = path or run.path / f"{'best-' * best}{FORMATS[format_]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write = {"onnx": _onnx, "torchscript": _torchscript, "state-dict": _state_dict}[format_]
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TorchScript's deprecation and the limits of tracing
        try:
            write(whole, temporary, whole.facts())
        except OSError:
            raise
        except Exception as error:  # tracing a user's model may raise anything
            reason = str(error).strip().partition("\n")[0]
            raise RunFolderError(
                f"{run.path}: {run.config['model.name']} cannot be exported as {format_} "
                f"({type(error).__name__}: {reason}). Use --format state-dict to export its "
                "arrays instead."
            ) from error
    return path


def _onnx(whole: Network, path: Path, facts: Mapping[str, str]) -> None:
    program = torch.onnx.export(
        whole,
        (whole.examples(2),),
        dynamo=True,
        input_names=["x"],
        output_names=["logits" if whole.federation.learns.classes else "output"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(facts)
    program.save(path)


def _torchscript(whole: Network, path: Path, facts: Mapping[str, str]) -> None:
    with torch.inference_mode():
        traced = torch.jit.trace(whole, whole.examples(2), check_trace=False)  # type: ignore[no-untyped-call]
        for count in (1, 3):  # tracing may have fixed the batch size
            x = whole.examples(count)
            torch.testing.assert_close(traced(x), whole(x))
    torch.jit.save(traced, path, _extra_files=dict(facts))


def _state_dict(whole: Network, path: Path, facts: Mapping[str, str]) -> None:
    from safetensors.torch import save

    arrays = {
        name: tensor.clone(memory_format=torch.contiguous_format)  # all that safetensors stores
        for name, tensor in whole.model.state_dict().items()
    }
    # `save_file` would create a file that other users cannot read.
    path.write_bytes(save(arrays, dict(facts)))
