"""Models that are tested without training (``evaluate.model``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairflower.config import RunConfig
from fairflower.config.methods import TaskSpec
from fairflower.data import Federation
from fairflower.data.cache import make_data_set
from fairflower.data.data_set import mean_and_std
from fairflower.errors import ConfigError, NotInstalled, failure_text, installed, logger, quoted
from fairflower.files import metadata
from fairflower.models import Model, exchanged_arrays, set_arrays, to_numpy
from fairflower.registry import CLASSIFICATION
from fairflower.server import checkpoint
from fairflower.server.contents import BEST, MODEL, check_same_file, read_config, read_facts
from fairflower.server.evaluation import CentralizedEvaluator
from fairflower.tables.encoding import Encoding
from fairflower.tables.sites import encoded_by


@dataclass(frozen=True)
class TrainedModel:
    """A model in a file, which a run tests."""

    path: Path
    #: What is known of the model: ``run.json`` of its run folder, or the metadata of its file.
    facts: Mapping[str, Any]
    folder: Path | None  # its run folder

    @classmethod
    def open(cls, model: str) -> TrainedModel:
        """Return the model that ``evaluate.model`` names.

        Raises ``ConfigError`` if there is none, and ``RunFolderError`` if its run has not written
        this file.
        """
        path, folder = checkpoint.model_at(model)
        facts = read_facts(folder) if folder else _read_json(metadata(path))
        if folder:
            check_same_file(path, facts)
        return cls(path, facts, folder)

    @property
    def label(self) -> str:
        """Name in tables: of a run's model its label and which model, else folder and file."""
        name = self.path.name
        which = {MODEL: "last model", BEST: "best model"}.get(name, name)
        return (
            f"{self.facts['label']} ({which})" if self.folder else f"{self.path.parent.name}/{name}"
        )

    @property
    def server_round(self) -> int:
        """The round after which the model was kept; 1 if it is unknown."""
        best = self.path.name.startswith("best")  # also an export, such as best-model.onnx
        known = self.facts.get("best", {}).get("round") if best else self.facts.get("rounds")
        return int(known or 1)

    def fitted(self, federation: Federation, config: RunConfig, sites: bool) -> Federation:
        """Return the federation as the model needs it: normalized as the model's training data.

        Sites also get the model's classes and channels, of which they may have fewer. Raises
        ``ConfigError`` if the model is of another task or other classes.
        """
        if sites:
            federation = self._at_sites(federation)
        self._check(self.facts, federation, "task", "classes")
        if self.encoding and federation.encoding:
            federation = self._encoded(federation, config, sites)
        scale = self._scale(config)
        own = any(getattr(federation, name) != value for name, value in scale.items()) and not sites
        if config.evaluate.by != "server" and (own or self.path.suffix in _PROGRAMS):
            raise ConfigError(
                f"{self._start}: it is a program, or its training data were normalized differently "
                f"from {config.data.name}, so clients cannot test it. Set evaluate.by = 'server'."
            )
        return replace(federation, **scale)

    def _at_sites(self, federation: Federation) -> Federation:
        """Return a federation of sites with all classes and channels of the model."""
        classes, known = tuple(self.facts.get("classes") or ()), dict[str, Any]()
        names = classes or tuple(map(str, range(self.facts.get("num_classes") or 0)))
        if federation.kind == "images" and "shape" in self.facts:
            known["shape"] = (self.facts["shape"][0], *federation.shape[1:])
        if federation.learns.classes and set(federation.class_names) < set(names):
            clients = []
            for client in federation.clients:
                counts = dict(zip(federation.class_names, client.class_counts, strict=True))
                spread = tuple(counts.get(name, 0) for name in names)
                clients.append(replace(client, class_counts=spread))
            known |= {"classes": classes, "num_classes": len(names), "clients": tuple(clients)}
        return replace(federation, **known)

    @cached_property
    def encoding(self) -> str:
        """How the model's rows of a table become features; empty if it is not of a table."""
        described = self.facts.get("table") or self.facts.get("sites") or {}
        exported = self.facts.get("encoding")  # of a model without its run folder
        known = json.loads(described.get("federation", {}).get("encoding", "{}")) or exported
        return Encoding.from_json(json.dumps(known)).to_json() if known else ""

    def _encoded(self, federation: Federation, config: RunConfig, sites: bool) -> Federation:
        """Return a federation of tables with the model's encoding and the scale of its targets."""
        if not sites and config.evaluate.by != "server" and federation.encoding != self.encoding:
            raise ConfigError(
                f"{self._start}: clients would encode these rows differently from those of its "
                "training. Set evaluate.by = 'server'."
            )
        federation = replace(federation, task=str(self.facts.get("task", federation.task)))
        return encoded_by(Encoding.from_json(self.encoding), federation)

    def _scale(self, config: RunConfig) -> dict[str, Any]:
        """Return mean and std of the training data; empty if they are those of ``config``."""
        scale: Mapping[str, Any] = self.facts.get("sites", {}).get("federation", self.facts)
        if self.folder and "sites" not in self.facts:
            data = checkpoint.run_config(self.folder, read_config(self.folder)).data
            if data.name == config.data.name:
                drawn = config.data.redraw or config.data.validated
                if drawn and config.data.seed != data.seed:
                    text = "%s was trained with data.seed = %d, so it may have seen the test or "
                    text += "validation examples that data.seed = %d draws."
                    logger.warning(text, self._start, data.seed, config.data.seed)
                return {}
            scale = mean_and_std(make_data_set(data), tuple(self.facts["shape"]))
        return {n: tuple(scale[n]) for n in ("mean", "std") if n in scale}

    def load(self, evaluator: CentralizedEvaluator) -> None:
        """Set the evaluator's model to this one.

        Raises ``ConfigError`` if its file is damaged, or it has other arrays or outputs.
        """
        if self.path.suffix in _PROGRAMS:
            self._load_program(evaluator)
            return
        model, sent = evaluator.model, exchanged_arrays(evaluator.model)
        try:
            tensors = load_file(self.path)
            if sent.keys() != tensors.keys() == model.state_dict().keys():  # frozen and tied arrays
                model.load_state_dict(tensors)
                tensors = {name: tensors[name] for name in sent}
            arrays = {name: to_numpy(tensor) for name, tensor in tensors.items()}
            set_arrays(model, arrays, evaluator.name)
        except SafetensorError as error:
            raise ConfigError(
                f"{self._start}: this file is damaged ({error}). Copy or export the model again."
            ) from error
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{self._start} does not contain a {evaluator.name} for "
                f"{evaluator.federation.name}: {error} Set model.name, client.name and data.name "
                "to those of its training."
            ) from error

    def _load_program(self, evaluator: CentralizedEvaluator) -> None:
        """Let an exported program, which normalizes examples itself, be the evaluator's model."""
        data, suffix = evaluator.federation, self.path.suffix
        try:
            program, facts = _PROGRAMS[suffix](self.path, evaluator.device)
        except NotInstalled:
            raise
        except Exception as error:  # of other libraries
            raise ConfigError(
                f"{self._start}: {suffix} cannot be read ({failure_text(error)[:200]}). A file of "
                "torch.save is never read, because it would be unpickled; save its arrays as "
                ".safetensors."
            ) from error
        self._check({"shape": "unknown", **_read_json(facts)}, data, "task", "shape", "classes")
        if data.learns.scaled:
            raise ConfigError(
                f"{self._start}: an exported network of the task {data.task} gives predictions, of "
                "which there is no loss. Test the run folder, or a state-dict."
            )
        scaled = len(data.mean)
        evaluator.federation = replace(data, mean=(0.0,) * scaled, std=(1.0,) * scaled)
        evaluator.model = Program(program, data.kind)

    def _check(self, facts: Mapping[str, Any], data: Federation, *names: str) -> None:
        """Raise ``ConfigError`` if what is known of the model differs from the data."""
        for name in names:
            known, own = facts.get(name), getattr(data, name)
            if name == "task":  # arguments, such as the kind of loss, may differ
                known = TaskSpec.read(str(known or CLASSIFICATION)).name if facts else None
                own = TaskSpec.read(own).name
            own = own if isinstance(own, str) else list(own)
            if known and own and known != own:
                raise ConfigError(
                    f"{self._start}: {name} {quoted(known)} in training, but {data.name} has "
                    f"{quoted(own)}. Choose data that fit the model."
                )

    @property
    def _start(self) -> str:
        return f"evaluate.model = {quoted(str(self.path))}"


class Program(Model):
    """An exported network. It takes raw examples, and has no arrays that could be sent."""

    def __init__(self, call: Callable[[Tensor], Tensor], kind: str) -> None:
        super().__init__()
        self.call, self.kind = call, kind

    def forward(self, x: Tensor) -> Tensor:
        """Return the program's logits of examples; images are from 0 to 1."""
        return self.call((255 * x).round().to(torch.uint8) if self.kind == "images" else x)


def _torchscript(path: Path, device: torch.device) -> tuple[Any, Mapping[str, Any]]:
    facts: dict[str, Any] = dict.fromkeys(("task", "shape", "classes"), "")
    script = torch.jit.load(path, device, facts)  # type: ignore[no-untyped-call]
    return lambda x: script(x), facts


def _onnx(path: Path, device: torch.device) -> tuple[Any, Mapping[str, Any]]:
    if not installed("onnxruntime"):
        raise NotInstalled("Testing an .onnx file needs ONNX Runtime. Run: pip install onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # batches are tested in parallel
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def call(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.numpy(force=True)})[0]).to(device)

    return call, session.get_modelmeta().custom_metadata_map


#: Suffix of an exported program -> its loader, which returns a function and metadata.
_PROGRAMS = {".pt": _torchscript, ".onnx": _onnx}


def _read_json(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what texts in JSON mean; others are left out."""
    values = {}
    for name, text in texts.items():
        with suppress(ValueError):
            values[name] = json.loads(text)
    return values
