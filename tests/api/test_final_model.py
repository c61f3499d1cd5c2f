"""Exported models give the same logits in ONNX Runtime, TorchScript and plain PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from command import call, invoke
from PIL import Image
from runs import config, history, run
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import vit_b_16

import fairflower as ff
from fairflower import errors
from fairflower.api import final_model
from fairflower.api.final_model import Network, export, load_model, load_run_model, network
from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.errors import ConfigError, NotInstalled, RunFolderError
from fairflower.models import Classifier, build, initial_local_arrays
from fairflower.models.prompt_vit import PromptViT
from fairflower.registry import MODELS
from fairflower.report import read_run
from fairflower.tasks import CLASSIFICATION, task_of
from fairflower.training.batches import examples_of
from fairflower.training.build import build_model

SCALES = {
    3: ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25)),
    2: ((), ()),
    1: (tuple(range(13)), tuple(range(1, 14))),
}


class Own(Classifier):
    """A user's model."""

    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the maximum of each channel."""
        return self.norm(self.conv(x)).amax((2, 3))


class Fixed(Own):
    """A model whose output depends on the number of images."""

    def features(self, x: Tensor) -> Tensor:
        """Return the features plus the number of images."""
        return super().features(x) + len(x)


class Undecided(Own):
    """A model whose control flow depends on the pixels, which no graph can represent."""

    def features(self, x: Tensor) -> Tensor:
        """Return the features or their negative."""
        h = super().features(x)
        return h if int(x.sum()) % 2 else -h


def wrapped(
    model: nn.Module, shape: tuple[int, ...], classes: int = 3, task: str = CLASSIFICATION
) -> Network:
    mean, std = SCALES[len(shape)]
    federation: Any = SimpleNamespace(shape=shape, mean=mean, std=std, classes=(), encoding="")
    names = tuple(map(str, range(classes)))
    vars(federation).update(class_names=names, task=task, learns=task_of(task))
    return Network(model, federation)


def built(name: str) -> Network:
    """A network with initial weights, whose BatchNorm layers have seen images."""
    shapes: dict[str, tuple[int, ...]] = {"embedding-bag": (50, 12), "gpt": (50, 12), "mlp": (13,)}
    shape = shapes.get(name, (3, 32, 32))
    task = {"unet": "segmentation", "gpt": "next-token"}.get(name, CLASSIFICATION)
    network = wrapped(build(name, 3, shape, seed=0, task=task_of(task)), shape, task=task)
    model = network.model.train()
    with torch.no_grad():
        model(torch.randn(8, *shape) if len(shape) != 2 else network.examples(8))
    model.eval()
    return network


def onnx_logits(path: Path, x: Tensor) -> np.ndarray:
    """Return logits by ONNX Runtime."""
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(None, {"x": x.numpy()})
    return logits


def check(network: Network, tmp_path: Path, atol: float = 1e-5) -> None:
    """Assert that files of both kinds give the same logits, for any number of examples."""
    final_model._onnx(network, tmp_path / "a.onnx", network.facts())
    final_model._torchscript(network, tmp_path / "a.pt", network.facts())
    script = torch.jit.load(tmp_path / "a.pt")
    for count in (1, 2, 7):
        x = network.examples(count)
        expected = network(x).numpy()
        np.testing.assert_allclose(onnx_logits(tmp_path / "a.onnx", x), expected, atol=atol)
        np.testing.assert_allclose(script(x).numpy(), expected, atol=atol)


#: Models that are tested only nightly, because a similar model is tested more often.
LIKE_OTHERS = ("resnet10", "resnet12", "resnet18", "prompt-vit-tiny", "vpt-vit-tiny")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in LIKE_OTHERS else pytest.mark.slow)
        for name in MODELS
        if not name.endswith("b-16")
    ],
)
def test_exports_of_every_model_give_its_logits(name: str, tmp_path: Path) -> None:
    check(built(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("prompt-vit-tiny", marks=pytest.mark.nightly), "mlp"]
)
def test_exports_handle_grayscale_images_that_are_resized_or_flattened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (1, 28, 20)
    monkeypatch.setitem(SCALES, 3, ((0.5,), (0.2,)))
    check(wrapped(build(name, 3, shape, seed=0), shape), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("gc_net", [True, False])
def test_exports_of_vit_b_16_give_its_logits(gc_net: bool, tmp_path: Path) -> None:
    shape = (3, 224, 224)
    check(wrapped(PromptViT(vit_b_16(), 3, shape, gc_net), shape), tmp_path, atol=1e-4)


# --- runs -------------------------------------------------------------------------------


AT_NIGHT = [pytest.param(name, marks=pytest.mark.nightly) for name in ("cnn", "prompt-vit-tiny")]


@pytest.fixture(scope="module", params=[*AT_NIGHT, f"{__name__}:Own"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with each model; the frozen arrays of the transformer are not sent."""
    client = {"client.name": "fedgc"} if request.param == "prompt-vit-tiny" else {}
    changes = {"model.name": request.param, "train.lr": 0.01, **client}
    return run(config(tmp_path_factory.mktemp("run"), **changes))


def raw_tests(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Raw test images of each domain, their labels and the accuracy that the run measured."""
    rows = [row for row in history(folder) if row["level"] == "domain" and row["round"] == "2"]
    accuracies = {row["name"]: float(row["value"]) for row in rows if row["metric"] == "accuracy"}
    federation = prepare(config(folder).data)
    return {domain: (*federation.test(domain), accuracies[domain]) for domain in federation.domains}


@pytest.mark.slow
def test_exports_of_a_run_reproduce_its_test_accuracy_and_logits(
    folder: Path, tmp_path: Path
) -> None:
    run = read_run(folder)
    whole = network(run)
    onnx = export(run, "onnx", tmp_path / "deep" / "a.onnx")
    script = torch.jit.load(export(run, "torchscript", tmp_path / "a.pt"))
    for domain, (x, y, accuracy) in raw_tests(folder).items():
        federation = prepare(config(folder).data)
        data = examples_of(federation.test(domain), federation.mean, federation.std)
        with torch.inference_mode():
            expected = whole.model(next(data.eval_batches(len(y)))[0]).numpy()
        for logits in (
            whole(torch.tensor(x)),
            script(torch.tensor(x)),
            onnx_logits(onnx, torch.tensor(x)),
        ):
            np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4)
            assert np.mean(np.asarray(logits).argmax(1) == y) == accuracy
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_a_state_dict_has_the_whole_model_including_frozen_weights(
    folder: Path, tmp_path: Path
) -> None:
    run = read_run(folder)
    path = export(run, "state-dict")
    assert path == folder / "state-dict.safetensors"
    arrays = load_file(path)
    sent = load_file(folder / "model.safetensors")
    assert sent
    assert all(torch.equal(arrays[name], array) for name, array in sent.items())
    federation = prepare(config(folder).data)
    fresh = build(run.config["model.name"], federation.num_classes, federation.shape, seed=5)
    fresh.load_state_dict(arrays)
    x = network(run).examples(3)
    torch.testing.assert_close(with_data_of(fresh, folder)(x), network(run)(x))
    with safe_open(path, "numpy") as file:
        facts = {name: json.loads(value) for name, value in file.metadata().items()}
    assert facts == {
        "kind": "images",
        "task": "classification",
        "shape": list(federation.shape),
        "mean": list(federation.mean),
        "std": list(federation.std),
        "classes": list(federation.class_names),
    }


def with_data_of(model: nn.Module, folder: Path) -> Network:
    return Network(model, prepare(config(folder).data))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(tmp_path_factory.mktemp("plain"), **{"num-server-rounds": 1}))


def test_the_network_of_a_result_takes_raw_images(plain: Path) -> None:
    whole = ff.read(plain)[0].network()
    federation = prepare(config(plain).data)
    x, _ = federation.test(federation.domains[0])
    raw = torch.tensor(x)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (federation.mean, federation.std))
    expected = whole.model((raw.float() / 255 - mean) / std)
    torch.testing.assert_close(whole(raw), expected)
    assert not whole.training
    assert not whole(raw).requires_grad


def test_the_export_command_writes_to_the_run_folder_or_a_given_file(
    plain: Path, tmp_path: Path
) -> None:
    output = call("export", str(plain), "--format", "torchscript")
    assert f"model: {plain / 'model.pt'}" in output
    facts = dict.fromkeys(("kind", "classes"), "")
    script = torch.jit.load(plain / "model.pt", _extra_files=facts)
    assert json.loads(facts["kind"]) == "images"
    whole = network(read_run(plain))
    assert json.loads(facts["classes"]) == list(whole.federation.class_names)
    torch.testing.assert_close(script(whole.examples(3)), whole(whole.examples(3)))
    other = tmp_path / "there" / "a.safetensors"
    call("export", str(plain), "-f", "state-dict", "--out", str(other))
    assert "head.weight" in load_file(other)


def test_exporting_a_run_of_sites_needs_no_data(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = network(read_run(plain))
    text = (plain / "run.json").read_text()
    sites = {"federation": json.loads(whole.federation.to_json()), "numbered": True}
    (plain / "run.json").write_text(json.dumps(json.loads(text) | {"sites": sites}))
    monkeypatch.setattr(final_model, "prepare", None)
    try:
        again = network(read_run(plain))
        damaged = json.loads(text) | {"sites": {**sites, "federation": {}}}
        (plain / "run.json").write_text(json.dumps(damaged))
        with pytest.raises(RunFolderError, match=r"run\.json: sites\.federation cannot be read"):
            network(read_run(plain))
    finally:
        (plain / "run.json").write_text(text)
    torch.testing.assert_close(again(whole.examples(3)), whole(whole.examples(3)))


def test_impossible_exports_are_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(plain)
    with pytest.raises(ConfigError, match=r"Unknown format 'onxx'. Did you mean 'onnx'"):
        export(run, "onxx")
    for kind, format_ in ((Fixed, "torchscript"), (Undecided, "torchscript")):
        exported = wrapped(kind(3, (3, 8, 8)).eval(), (3, 8, 8))
        monkeypatch.setattr(final_model, "network", lambda *_, exported=exported: exported)
        with pytest.raises(
            RunFolderError, match=rf"cnn cannot be exported as {format_} .*state-dict"
        ):
            export(run, format_, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    (plain / "model.safetensors").rename(tmp_path / "away")
    monkeypatch.undo()
    try:
        with pytest.raises(RunFolderError, match=r"model\.safetensors is missing"):
            export(run, "state-dict")
    finally:
        (tmp_path / "away").rename(plain / "model.safetensors")


@pytest.mark.slow
def test_a_model_without_a_static_graph_is_not_exported_as_onnx(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = wrapped(Undecided(3, (3, 8, 8)).eval(), (3, 8, 8))
    monkeypatch.setattr(final_model, "network", lambda *_: exported)
    with pytest.raises(RunFolderError, match=r"cnn cannot be exported as onnx .*state-dict"):
        export(read_run(plain), "onnx", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_exporting_onnx_without_its_libraries_names_the_extra(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "installed", lambda library: library != "onnx")
    with pytest.raises(NotInstalled, match=r'onnx needs onnx\. Run: pip install "fairflower\[exp'):
        export(read_run(plain), "onnx")


def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    plain: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    file.touch()
    for out, reason in (
        (tmp_path, "is a folder"),
        (file, "expected a file name that ends in .onnx"),
    ):
        refused = invoke("export", plain, "--out", out)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"Error: --out {out}")
        assert reason in refused.stderr
        assert not refused.stdout


@pytest.mark.parametrize("client", ["lg-fedavg", "fedper"])
def test_a_loaded_model_has_the_initial_local_arrays(tmp_path: Path, client: str) -> None:
    settings = {"client.name": client, "model.name": "cnn:norm=batch", "seed": 3}
    folder = run(config(tmp_path, **settings, **{"num-server-rounds": 1}))
    result = read_run(folder)
    run_config = RunConfig.from_flat(result.config)
    model = load_model(result, run_config, prepare(run_config.data))
    like = build_model(run_config.model, run_config.client, prepare(run_config.data), seed=3)
    assert initial_local_arrays(like)
    for name, array in initial_local_arrays(like).items():
        assert torch.equal(model.state_dict()[name], array)


def test_a_model_is_not_used_with_examples_that_changed(tmp_path: Path) -> None:
    result = read_run(run(config(tmp_path)))
    load_run_model(result, "", "cpu")
    result.info["digest"] = "of other examples"
    for use in (lambda: network(result), lambda: load_run_model(result, "", "cpu")):
        with pytest.raises(ConfigError, match=r"had other examples than data\.dir has now"):
            use()


@pytest.mark.slow
def test_the_programs_in_the_guide_give_the_predictions_of_the_run(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    loading, running = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    federation = prepare(config(plain).data)
    x, _ = federation.test(federation.domains[0])
    monkeypatch.chdir(tmp_path)
    Image.fromarray(x[0].transpose(1, 2, 0)).save("image.png")
    export(read_run(plain), "onnx", Path("model.onnx"))
    capsys.readouterr()
    exec(compile(loading.replace('"RUN"', repr(str(plain))), "loading", "exec"), {})
    exec(compile(running, "running", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    expected = network(read_run(plain))(torch.tensor(x[:1])).softmax(1)[0]
    name, probability = first.rsplit(maxsplit=1)
    assert name == second == federation.class_names[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), rel=1e-5)
