"""The documents: their programs run, and their tables match the code."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections import OrderedDict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import tables as needs
import torch
import yaml
from command import SHARPNESS, call
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from PIL import Image
from processes import environment
from processes import run as run_process
from torch import nn
from torch.nn import functional as F

from experiments.leaderboard.design import Design
from fairflower import registry
from fairflower import strategies as shipped
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.participation import Draw, checked_choice
from fairflower.clients import fisher_diagonal, mean_loss, mean_representation
from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.data.partition import apply_partitioner
from fairflower.engines.inline import InlineGrid
from fairflower.exchanges import centers
from fairflower.report import read_run
from fairflower.server.contents import read_history
from fairflower.strategies import STRATEGIES, FairStrategy
from fairflower.testing import check_data, check_strategy, check_task, check_trainer

DOCS = Path(__file__).parents[1] / "docs"
LIARS = DOCS.parent / "experiments" / "liars.md"
CLIENTS = 4

#: Page or pages -> the most words that they may have together, as counted by ``wc -w``.
WORDS = {
    "docs/*.md": 32_000,
    "README.md": 900,
    "CONTRIBUTING.md": 3010,
    "docs/cluster.md": 550,
    "docs/deployment.md": 3920,
    "docs/differential-privacy.md": 1050,
    "docs/faults.md": 2000,
    "docs/guide.md": 2700,
    "docs/leaderboard.md": 250,
    "docs/methods.md": 2200,
    "docs/other-libraries.md": 600,
    "docs/privacy.md": 3550,
    "docs/python.md": 900,
    "docs/report.md": 1250,
    "docs/results.md": 1200,
    "docs/settings.md": 2400,
    "docs/tune.md": 850,
    "docs/use-one-strategy.md": 1700,
    "docs/which-method.md": 800,
    "docs/your-own-parts.md": 2300,
}


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Loader(list):  # type: ignore[type-arg]
    dataset = range(12)


def load_data(partition_id: int) -> Loader:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(int(partition_id)))
    y = (x[:, 0] > 0.1 * int(partition_id)).long()
    return Loader(zip(x.split(6), y.split(6), strict=True))


def train(net: nn.Module, loader: Loader) -> float:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


def get_weights(net: nn.Module) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in net.state_dict().values()]


def set_weights(net: nn.Module, arrays: list[np.ndarray]) -> None:
    pairs = zip(net.state_dict(), arrays, strict=True)
    net.load_state_dict(OrderedDict((name, torch.tensor(array)) for name, array in pairs))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a page's program with a module ``task`` made from this file."""
    task = ModuleType("task")
    for thing in (Net, load_data, train, get_weights, set_weights):
        setattr(task, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "task", task)
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    texts = dict(re.findall(r"```python (\S+)\n(.*?)```", pages, flags=re.DOTALL))

    def run(name: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec(compile(texts[name], name, "exec"), names)
        return names

    run.texts = texts  # type: ignore[attr-defined]
    return run


class Grid(InlineGrid):
    run = SimpleNamespace(run_id=1)  # type: ignore[assignment]


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[FairStrategy]:
    """Collect the strategy once for every round that it merges."""
    instances = []
    aggregate = FairStrategy.aggregate_train

    def noted(self: FairStrategy, server_round: int, replies: Any) -> Any:
        result = aggregate(self, server_round, replies)
        assert len(self.client_ids) == CLIENTS
        assert not self.dropped
        instances.append(self)
        return result

    monkeypatch.setattr(FairStrategy, "aggregate_train", noted)
    return instances


@pytest.mark.parametrize("style", ["", "classic-"])
def test_documented_server_and_client_programs_run(
    style: str, programs: Any, merged: list[Any]
) -> None:
    server, client = programs(f"{style}server")["app"], programs(f"{style}client")["app"]
    server(Grid(client, CLIENTS), Context(1, 1, {}, RecordDict(), {}))
    assert len(merged) == 3


#: Runs the programs of each style in a folder of its own, one after the other in one process.
IN_TURN = f"""
import importlib, os, sys
from flwr.simulation import run_simulation
for style in ("plain", "classic-", "scaffold-"):
    sys.path[0] = os.environ["PYTHONPATH"] = os.path.abspath(style)  # also of Ray's workers
    for name in ("task", "client", "server"):
        sys.modules.pop(name, None)
    client, server = map(importlib.import_module, ("client", "server"))
    run_simulation(server.app, client.app, {CLIENTS})
    print("ended:", style, server.__file__, flush=True)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_documented_programs_run_clean_on_flowers_simulation(programs: Any, tmp_path: Path) -> None:
    """Copied as printed, with a module ``task``; no client or server logs an error or a warning."""
    used = [Net, PictureNet, Loader, load_data, load_arrays, train, get_weights, set_weights]
    task = ["from collections import OrderedDict", "import numpy as np, torch"]
    task += ["from torch import nn", "from torch.nn import functional as F"]
    task += [inspect.getsource(thing) for thing in used]
    for style in ("", "classic-", "scaffold-"):
        folder = tmp_path / (style or "plain")
        folder.mkdir()
        own = ["Net = PictureNet"] if style == "scaffold-" else []
        (folder / "task.py").write_text("\n".join(task + own))
        for part in ("server", "client"):
            (folder / f"{part}.py").write_text(programs.texts[style + part])
    (tmp_path / "all.py").write_text(IN_TURN)
    text = run_process([sys.executable, "all.py"], env=environment(tmp_path), cwd=tmp_path)
    assert len(re.findall(r"ended: (\S+) \S+/\1/server.py", text)) == 3
    assert "Traceback" not in text
    assert "ERROR" not in text
    allowed = ("fraction_evaluate is set to 0.0", "deprecated", "_fn provided", "terminating")
    warned = [line for line in text.splitlines() if "WARNING" in line]
    assert [line for line in warned if not any(part in line for part in allowed)] == []


def test_documented_clients_work_with_fedequilibria_in_both_styles(
    programs: Any, merged: list[Any]
) -> None:
    """The pages' clients, which send messages or lists, get the same weights."""
    server = programs("server")["app"]
    server(Grid(programs("client")["app"], CLIENTS), Context(1, 1, {}, RecordDict(), {}))
    assert len(merged) == 3
    by_message = merged[-1].diagnostics["weights"]
    classic = programs("classic-server")["app"], programs("classic-client")["app"]
    classic[0](Grid(classic[1], CLIENTS), Context(1, 1, {}, RecordDict(), {}))
    assert len(merged) == 6
    by_list = merged[-1].diagnostics["weights"]
    np.testing.assert_array_equal(by_message, by_list)


class Attention(nn.Module):
    """A transformer of one frozen head, whose queries and values have adapters, and its classes."""

    def __init__(self, adapted: Any, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 8, dtype=dtype).requires_grad_(False)
        self.query, self.value = (adapted(nn.Linear(8, 8, dtype=dtype)) for _ in range(2))
        self.classes = nn.Linear(8, 3, dtype=dtype).requires_grad_(False)

    def represent(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return (self.query(x) @ x.mT).softmax(-1).matmul(self.value(x)).mean(1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classes(self.represent(tokens))
        return out.float()


ADAPTING: dict[str, dict[str, Any]] = {
    **{"FedAvg": {}, "FedHEAL": {"tau": 0.3, "beta": 0.4}, "FedISM": {}, "FedGCR": {}},
    **{"FedEquilibria": {}, "AFL": {}, "QFFL": {"lr": 0.1}},
}


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ADAPTING)
def test_adapters_are_merged_in_the_dtype_in_which_they_are_sent(
    name: str, kind: str, programs: Any, merged: list[Any]
) -> None:
    """Arrays of float16 from a network in float32, and, as the page says, float32 of bfloat16."""
    page = programs("adapters")
    sent = torch.float16 if kind == "float16" else torch.float32
    net = Attention(page["LoRA"], torch.bfloat16 if kind == "bfloat16" else torch.float32)
    first = page["get_adapters"](net)

    def arrays(values: Any) -> ArrayRecord:
        return ArrayRecord({key: value.detach().to(sent) for key, value in values.items()})

    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        torch.manual_seed(k := int(context.node_config["partition-id"]))
        x = torch.randint(0, 11, (6 + k, 5))
        batches = [(x, x.sum(1) % 3)]
        page["set_adapters"](net, message.content["arrays"])
        metrics = {"num-examples": len(x), "received_loss": mean_loss(net, batches)}
        metrics |= {"train_loss": metrics["received_loss"], "sharpness": 0.1 * (k + 1)}
        h = mean_representation(net, batches, net.represent)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), batches[0][1]).backward()
            optimizer.step()
        reply = {"arrays": arrays(page["get_adapters"](net).to_torch_state_dict())}
        records = {"metrics": MetricRecord(metrics), "received_representation": arrays(h)}
        records["fisher"] = arrays(fisher_diagonal(net, batches))
        return Message(RecordDict({**reply, **records}), reply_to=message)

    nodes = {"min_available_nodes": CLIENTS, "fraction_evaluate": 0.0}
    strategy = getattr(shipped, name)(**ADAPTING[name], **nodes)
    start = arrays(first.to_torch_state_dict())
    result = strategy.start(Grid(app, CLIENTS), start, num_rounds=2).arrays
    assert len(merged) == 2
    trained = ["query.down", "query.up", "value.down", "value.up"]
    assert list(result) == list(first) == [f"{name}.weight" for name in trained]
    for key, array in result.items():
        assert array.numpy().dtype == np.dtype(str(sent).removeprefix("torch."))
        assert np.isfinite(array.numpy()).all()
        assert (array.numpy() != start[key].numpy()).any()


def test_flower_refuses_bfloat16() -> None:
    """Once Flower accepts it, the page can be shortened."""
    with pytest.raises(TypeError, match="unsupported ScalarType BFloat16"):
        ArrayRecord({"w": torch.zeros(2, dtype=torch.bfloat16)})


class PictureNet(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(16, 10))


def load_arrays(number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    images, labels = (rng.integers(0, most, size) for most, size in ((256, (9, 1, 4, 4)), (10, 9)))
    return [images.astype(np.uint8), labels, images.astype(np.uint8), labels]


def test_documented_scaffold_clients_share_control_variates(
    programs: Any, merged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = sys.modules["task"]
    monkeypatch.setattr(task, "Net", PictureNet)
    monkeypatch.setattr(task, "load_arrays", load_arrays, raising=False)
    server, client = programs("scaffold-server")["app"], programs("scaffold-client")["app"]
    server(Grid(client, CLIENTS), Context(1, 1, {}, RecordDict(), {}))
    assert len(merged) == 3
    (variates,) = merged[-1].exchanges
    assert any(np.abs(array).max() > 0 for array in variates.c.values())


def test_documented_helpers_compute_valid_values(programs: Any) -> None:
    values = programs("helpers")
    trained = dict(Net().named_parameters())
    assert values["fisher"].keys() == values["gradient"].keys() == trained.keys()
    assert all((value >= 0).all() for value in values["fisher"].values())
    assert values["rise"] > 0


def test_documented_strategies_pass_check_strategy(programs: Any) -> None:
    check_strategy(programs("mine.py")["LossPower"], power=2.0)
    check_strategy(programs("half.py")["HalfStep"])
    check_trainer(programs("focal.py")["Focal"], gamma=1.0)
    check_strategy(programs("smoothed.py")["Smoothed"])


def test_the_documented_measurement_reaches_its_strategy(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "entropy.py").write_text(programs.texts["entropy.py"])
    monkeypatch.syspath_prepend(tmp_path)
    folder = runs.run(runs.config(tmp_path, **{"strategy.name": "entropy:Unsure"}))
    last = json.loads((folder / "diagnostics.jsonl").read_text().splitlines()[-1])
    entropy = [
        float(row["value"])
        for row in runs.history(folder)
        if row["metric"] == "entropy:entropy" and int(row["round"]) == last["round"]
    ]
    assert 0 < min(entropy) <= max(entropy) <= np.log(10)
    assert last["weights"] == pytest.approx(np.array(entropy) / sum(entropy))
    check_strategy(programs("entropy.py")["Unsure"])


def test_the_documented_tracker_writes_a_line_for_every_round(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines.py").write_text(programs.texts["lines.py"])
    monkeypatch.syspath_prepend(tmp_path)
    folder = runs.run(runs.config(tmp_path, track="lines:JSONLines:file=log.jsonl"))
    rounds = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rounds] == [0, 1, 2]
    assert all(0 <= row["accuracy/AVG"] <= 1 for row in rounds)


def test_every_field_of_a_cohort_is_documented() -> None:
    table = needs.cohort()
    for field in dataclasses.fields(Cohort):
        assert table.count(f"| `{field.name}` | ") == 1
    assert "| `average(weights)` | Return the weighted mean" in table


QUICK = {
    "engine": "inline",
    "num-server-rounds": 4,
    "data.clients-per-domain": 1,
    "train.local-epochs": 2,
    "train.lr": 3.0,
}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_documented_texts_can_be_shown_compared_and_analyzed(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder of ``reviews.py``, as the page says; the loss is the page's own."""
    namespace = programs("reviews.py")
    check_data(namespace["Reviews"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    for name in ("reviews.py", "focal.py"):
        (tmp_path / name).write_text(programs.texts[name])
    output = call("data", "show", "reviews:Reviews")
    assert re.search(r"tokens per text +\S+ ±", output)
    assert not list(tmp_path.glob("*.png"))
    assert "--out x.png: tokens cannot be drawn as images" in call(
        "data", "show", "reviews:Reviews", "--out", "x.png", expect=2
    )

    options = [f"--set={key}={value}" for key, value in QUICK.items()]
    methods = ["--clients=sgd,focal:Focal", "--strategies=fedavg,afl", "--output-dir=out"]
    call("compare", "--data=reviews:Reviews", "--seeds=0", "--jobs=1", *methods, *options)
    runs = [read_run(path) for path in sorted(Path("out/runs").iterdir())]
    assert len(runs) == 6  # uniform is in every comparison
    for run in runs:
        assert run.config["model.name"] == "embedding-bag"
        # Praise or complaint is in the first word: what is learned in one shop helps the others.
        assert min(run.values[-1]) > 0.9
    assert "focal:Focal" in call("out/runs", command=SHARPNESS)


def test_the_documented_manifest_keeps_patients_together(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(40):
        place = tmp_path / ("north", "south")[k % 2] / f"patient {k // 4}"
        place.mkdir(parents=True, exist_ok=True)
        gray = np.full((4, 4), k, np.uint8)
        Image.fromarray(gray).save(place / f"{('healthy', 'ill')[k // 8 % 2]}-{k}.png")
    monkeypatch.setattr(sys, "argv", ["list_images.py", str(tmp_path)])
    programs("list_images.py")
    federation = prepare(DataConfig("images", dir=str(tmp_path), patient="patient", image_size=4))
    assert federation.domains == ("north", "south")
    assert federation.classes == ("healthy", "ill")
    for domain in federation.domains:
        splits = [federation.test(domain, split).x[:, 0, 0, 0] // 4 for split in ("train", "test")]
        assert {*splits[0].tolist(), *splits[1].tolist()} == {*range(10)}
        assert not {*splits[0].tolist()} & {*splits[1].tolist()}


@pytest.mark.slow
def test_the_documented_tables_of_hospitals_go_from_the_folder_to_a_prediction(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's commands, with fewer methods, federations and rounds."""
    monkeypatch.chdir(tmp_path)
    programs("hospitals.py")
    page = (DOCS / "data.md").read_text()
    tables = page.partition("## Your own tables")[2].partition("\n## ")[0]
    commands = re.findall(r"^    fairflower ((?:.*\\\n)*.*)", tables, re.MULTILINE)
    first = [text.replace("\\\n", " ").split() for text in commands]
    proposed, described, shown, compared, predicted = first
    said = call(*described)
    assert "The column 'ward' is ignored, because north, west lack it." in said
    assert "Chance would give fewer" not in said
    assert Path("statistics/index.html").is_file()
    quick = {"fedavg,qffl": "fedavg", "alone,pooled": "alone", "0-4": "0", "10": "1", "2": "1"}
    call(*(quick.get(word, word) for word in compared), "-s", "engine=inline")
    (text,) = re.findall(r"```toml schema.toml\n(.*?)```", tables, re.DOTALL)
    kinds = {name: own["kind"] for name, own in tomllib.loads(text)["columns"].items()}
    made = tomllib.loads(call(*proposed[:-2]))["columns"]
    assert {name: own["kind"] for name, own in made.items()} == kinds | {"ward": "ignored"}
    Path(proposed[-1]).write_text(text)
    assert "bmi: missing" in call(*shown)
    assert "training patients" in call(*described)
    Path("new.csv").write_text("sex,age,smoking,bmi\nM,71,never,\n")
    call(*predicted)
    (row,) = csv.DictReader(Path("predicted.csv").read_text().splitlines())
    names = programs("predict_one.py")
    found = names["network"].from_row({"sex": "M", "smoking": "never", "age": 71, "bmi": None})
    assert float(row["probability of yes"]) == round(found["probability of yes"], 6)


def test_the_power_in_the_guide_is_that_of_the_simulations() -> None:
    page = (DOCS.parent / "experiments" / "error-rates.md").read_text(encoding="utf-8")
    (header, *rows), *_ = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    ]
    found = [dict(zip(header, row, strict=True)) for row in rows if row[0] == "3"]
    assert len(found) == 3
    guide = (DOCS / "guide.md").read_text(encoding="utf-8")
    for row in found:
        shares = (f"{float(row[f'{points} points found']):.0f} %" for points in (2, 4))
        assert f"| {' | '.join([row['replicates'], *shares])} |" in guide


def test_the_documented_partitioner_gives_each_client_two_classes(programs: Any) -> None:
    data_set = programs("pathological.py")["TwoClasses"](DataConfig(clients_per_domain=5))
    labels = np.arange(100) % 10
    parts, _ = apply_partitioner(data_set, "cifar10", labels)
    assert [len(set(labels[part])) for part in parts] == [2] * 5
    rows = np.concatenate(parts)
    assert len(rows) == len(set(rows)) > 0


def test_the_documented_focal_loss_matches_the_paper(programs: Any) -> None:
    """gamma 0 gives the cross entropy; with gamma 2, probability 0.9 counts a hundredth."""
    net = nn.Identity()
    x, y = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log(), torch.tensor([0, 0])

    def loss(gamma: float) -> float:
        own = SimpleNamespace(model=net, gamma=gamma)
        return float(programs("focal.py")["Focal"].loss(own, x, y))

    entropies = -np.log([0.9, 0.5])
    assert loss(0) == pytest.approx(entropies.mean(), rel=1e-6)
    assert loss(2) == pytest.approx((entropies * [0.01, 0.25]).mean(), rel=1e-5)


def test_the_page_on_packages_quotes_the_example() -> None:
    page = (DOCS / "your-own-parts.md").read_text()
    example = DOCS.parent / "examples" / "my-method"
    project = (example / "pyproject.toml").read_text()
    (entry_points,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert entry_points in project
    rule = (example / "my_method" / "strategy.py").read_text()
    assert rule.partition("class LossPower")[2] in page


def test_the_documented_metrics_are_computed_in_a_run(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_metrics.py").write_text(programs.texts["my_metrics.py"])
    monkeypatch.syspath_prepend(tmp_path)
    metrics = "my_metrics:macro_f1,my_metrics:overconfidence"
    folder = runs.run(runs.config(tmp_path, **{"evaluate.metrics": metrics}))
    run = read_run(folder)
    scores = {score.name: score.better for score in run.user_scores}
    assert scores == {"macro_f1": 1, "overconfidence": -1}
    assert all(np.isfinite(run.scores[name].values).all() for name in scores)


def test_the_documented_private_strategy_can_be_constructed(programs: Any) -> None:
    wrapper = programs("private-server")["strategy"]
    assert isinstance(wrapper.strategy, FairStrategy)


def test_the_documented_policy_chooses_the_smallest_clients(programs: Any) -> None:
    policy = programs("smallest.py")["Smallest"]()
    sizes = {1: 50, 3: 9, 4: 20, 7: 20, 8: 20}
    chosen = [checked_choice(policy, Draw(r, (1, 3, 4, 7, 8), 2, 0, sizes), {}) for r in range(20)]
    assert {*map(tuple, chosen)} == {(3, 4), (3, 7), (3, 8)}


def test_the_documented_leaderboard_is_a_valid_design(tmp_path: Path) -> None:
    page = DOCS.parent / "experiments" / "leaderboard" / "README.md"
    (design,) = re.findall(r"```toml\n(.+?)```", page.read_text(), re.S)
    path = tmp_path / "board.toml"
    path.write_text(design)
    board = Design.read(path)
    assert [benchmark.name for benchmark in board.benchmarks] == ["digits"]
    config = board.config(board.benchmarks[0], "fedheal", 3)
    assert (config.data.name, config.data.seed, config.num_server_rounds) == ("uci-digits", 3, 30)
    assert min(prepare(config.data).validation_sizes) > 0


@pytest.mark.parametrize("path", needs.DOCUMENTS, ids=lambda path: path.name)
def test_generated_tables_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    assert needs.filled(text) == text, "run python docs/tables.py"


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the program that measures the influence of one lying client."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    import liar

    monkeypatch.setattr(centers, "cluster", centers.cluster)  # it is restored at the end
    liar.set_task_identity()
    liar.find_clusters_once()
    return liar


def liar_tables() -> list[list[list[str]]]:
    """Return the cells of the tables about one lying client."""
    section, _, _ = LIARS.read_text().partition("\n## Several liars")
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        for table in tables
    ]


def assert_same(actual: list[str], documented: list[str]) -> None:
    """Compare rows of rounded numbers, with tolerances for other processors."""
    numbers = [
        pytest.approx(float(n), rel=0.5 if "e" in n else 0.01, abs=0.015) for n in documented[1:]
    ]
    assert actual[0] == documented[0]
    assert [float(n) for n in actual[1:]] == numbers, "run benchmarks/liar.py"


def test_the_table_on_liars_in_training_matches_its_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    import liars

    table = liars.table(liars.read_summary(liars.CSV))
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert "\n".join(rows) in LIARS.read_text(), "run benchmarks/liars.py"


@pytest.mark.slow
def test_the_tables_on_liars_list_existing_strategies(liar: Any) -> None:
    """All strategies are listed only at a release: a new one needs no row until then."""
    by_strategy, remembering, exchanges = (
        {row[0].strip("`"): row for row in table} for table in liar_tables()
    )
    assert by_strategy.keys() <= STRATEGIES.keys()
    assert remembering.keys() <= {name for name, rule in STRATEGIES.items() if rule.STATE}
    assert exchanges.keys() <= set(liar.EXCHANGES)
    assert_same(liar.row("fairfed"), by_strategy["fairfed"])  # a fast one


#: Strategies whose rows take longer to measure than all others together.
LONG_TO_MEASURE = {"fedequilibria", "fedfv", "fedgcr", "fedce", "fedga"}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_tables_on_liars_match_measurements(liar: Any) -> None:
    by_strategy, remembering, exchanges = liar_tables()
    for table, measure in ((by_strategy, liar.row), (remembering, liar.long_row)):
        for row in table:
            if (name := row[0].strip("`")) not in LONG_TO_MEASURE:
                assert_same(measure(name), row)
    for row in exchanges[::2]:
        assert_same(liar.exchange_row(row[0].strip("`"), float(row[1])), row)


@pytest.mark.parametrize(
    "methods", [registry.STRATEGIES, registry.CLIENTS], ids=["strategies", "clients"]
)
def test_every_docstring_of_a_method_has_see_also_and_examples(methods: Any) -> None:
    for name, method in methods.items():
        text = method.__doc__ or ""
        assert "\n    See Also\n    --------\n" in text, name
        assert "\n    Examples\n    --------\n    >>> " in text, name


def test_every_generated_table_is_in_a_document() -> None:
    text = "".join(path.read_text() for path in needs.DOCUMENTS)
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(needs.TABLES)


LINKING = [*DOCS.glob("*.md"), *DOCS.parent.glob("experiments/**/*.md"), *DOCS.parent.glob("*.md")]


@pytest.mark.parametrize("path", LINKING, ids=str)
def test_targets_of_links_between_documents_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_keys_and_certificates_are_ignored_by_git():
    paths = ["certificates/server.key", "superlink.db", "superlink.db-wal", "site.key", "a.key.pub"]
    command = ["git", "check-ignore", *paths]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a clone")
    assert done.stdout.splitlines() == paths


def test_the_documented_task_learns_the_quantile_of_demand(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orders.py").write_text(programs.texts["orders.py"])
    monkeypatch.syspath_prepend(tmp_path)
    check_task(importlib.import_module("orders").OrderCost, num_outputs=1)
    settings = {"data.name": "orders:Shops", "num-server-rounds": 30, "train.lr": 0.02}
    whole = {"data.examples-per-client": 0, "data.test-examples": 0, "train.local-epochs": 3}
    folder = runs.run(runs.config(tmp_path, **settings, **whole))
    rows = read_history(folder / "history.csv")
    costs = {row.name: row.value for row in rows if row.metric == "cost"}  # of the last round

    def expected(order: Any, k: int) -> Any:  # demand is uniform on [day, day + k]
        few = (10 * (k - order) ** 2 / 2 + order**2 / 2) / k
        return np.where(order < k, few, order - k / 2)

    best = min(np.mean([expected(order, k) for k in (1, 2, 3)]) for order in np.linspace(0, 3, 301))
    assert 0.8 * best < np.mean(list(costs.values())) < 1.3 * best
    assert costs["north"] < costs["station"]


@pytest.mark.parametrize("pages", WORDS)
def test_no_page_is_longer_than_a_reader_reads(pages: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCS.parent.glob(pages)]
    assert sum(len(text.split()) for text in texts) <= WORDS[pages]


def test_the_citation_file_is_valid() -> None:
    """Its keys are those of https://citation-file-format.github.io, and agree with the package."""
    text = (DOCS.parent / "CITATION.cff").read_text(encoding="utf-8")
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load(text)
    required = {"cff-version", "message", "title", "authors"}
    optional = "abstract commit contact date-released doi identifiers keywords license license-url "
    optional += "preferred-citation references repository repository-artifact repository-code type "
    assert required <= citation.keys() <= {*required, *optional.split(), "url", "version"}
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in {"software", "dataset"}
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    (bibtex,) = re.findall(r"@software\{.*?\n\}", (DOCS / "guide.md").read_text("utf-8"), re.DOTALL)
    (author,) = citation["authors"]
    for value in (citation["title"], f"{{{author['name']}}}", citation["version"]):
        assert f"{{{value}}}" in bibtex
    entity, person = {"name"}, {"family-names", "given-names", "orcid", "affiliation", "email"}
    assert all(a.keys() <= entity or a.keys() <= person for a in citation["authors"])
    assert citation["authors"]
    assert all(citation["authors"])


#: Door of the README -> questions, the page with the answer, its section, and words of the answer.
QUESTIONS = {
    "I compare methods": [
        ("How do I install it?", "docs/guide.md", "Install", 'pip install ".[sim]"'),
        ("What is a domain?", "README.md", "fairflower", "A *domain* is a source of data"),
        ("What do I run first?", "README.md", "fairflower", "uv run fairflower compare"),
        ("What do columns mean?", "docs/report.md", "Accuracy", "deviation over domains"),
        ("Is a difference real?", "docs/report.md", "Differences", "p < 0.05 and at least five"),
        (
            "Which method first?",
            "docs/which-method.md",
            "Which method first?",
            "**uniform weights**",
        ),
        ("How do I tune fairly?", "docs/tune.md", "Steps of a study", "the same number of trials"),
        ("How do I add my method?", "docs/your-own-parts.md", "A strategy in a file", "def weigh("),
        ("Where are tables for a paper?", "docs/guide.md", "Tables for a paper", "--format latex"),
        (
            "How do I repeat Table 2 of FedHEAL?",
            "experiments/README.md",
            "Table 2, Figure 7",
            "compare --config",
        ),
        ("How do I use my data?", "docs/data.md", "A judged report", "--data table"),
        ("How do I use a GPU?", "docs/guide.md", "Engines", "Clients use a GPU if there is one"),
        ("How many seeds?", "docs/guide.md", "How many seeds", "Verdicts need at least five"),
    ],
    "I connect sites": [
        (
            "How much memory do I need?",
            "docs/deployment.md",
            "What do I need?",
            "**Memory** of a site",
        ),
        ("How long does a round take?", "docs/deployment.md", "What it costs", "a round of warm"),
        ("How do I try it?", "docs/deployment.md", "Try it on one machine", "deploy trial"),
        ("Who makes certificates?", "docs/deployment.md", "1. The server", "deploy certificates"),
        ("Who makes keys?", "docs/deployment.md", "2. A site", "deploy key site.key"),
        ("Where do data lie, and how?", "docs/deployment.md", "A site's data", "`data.name` says"),
        ("What leaves a site?", "docs/privacy.md", "What leaves a client", "| who gets it |"),
        (
            "How does a site forbid it?",
            "docs/deployment.md",
            "A site's policy",
            "deploy policy > policy.toml",
        ),
        (
            "Are we better off alone?",
            "docs/deployment.md",
            "Better off alone?",
            "by domain who gains",
        ),
        ("What if a site fails?", "docs/faults.md", "A client or site is left", "when it is back"),
        ("What if a site withdraws?", "docs/deployment.md", "Who takes part", "withdraws"),
        ("Which diagnosis has a new patient?", "docs/data.md", "A new patient", "predict"),
        ("How do sites get the model?", "docs/deployment.md", "3. A run", "send it to the sites"),
        ("Who gets which file?", "docs/deployment.md", "What do I need?", "| goes to |"),
        ("How do we upgrade?", "docs/deployment.md", "How do I upgrade?", "deploy sites prod"),
        (
            "What do masks protect from?",
            "docs/privacy.md",
            "Against whom it holds",
            "a server that follows the protocol",
        ),
    ],
}


@pytest.mark.parametrize(
    ("door", "question", "page", "heading", "answer"),
    [pytest.param(door, *asked, id=asked[0]) for door, of in QUESTIONS.items() for asked in of],
)
def test_a_question_is_answered_one_click_from_its_door(
    door: str, question: str, page: str, heading: str, answer: str
) -> None:
    root = DOCS.parent
    table = (root / "README.md").read_text(encoding="utf-8").partition(f"| {door} |")[2]
    links = re.findall(r"\]\(([^)#]+)", table.partition("\n\n")[0])
    assert len(links) <= 8
    assert page in {"README.md", *links}, question
    text = (root / page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ (?=.*\n\n)", text, flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(heading)]
    assert answer in " ".join(section.split()), question


def sentences(text: str) -> list[str]:
    """Return a page's sentences, without code, tables, headings and targets of links."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(<!--|    |\s*\||#).*", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "", text))
    parts = re.split(r"[.!?]\W*\s|\n\n|\n *(?:-|\d+\.) ", f"{text}\n\n")
    return [part for part in parts if len(part.split()) > 1]


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_sentences_have_at_most_twenty_words_on_average(path: Path) -> None:
    found = sentences(path.read_text(encoding="utf-8"))
    assert 0 < sum(len(sentence.split()) for sentence in found) <= 20 * len(found)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_every_page_ends_with_one_or_two_links_to_the_next(path: Path) -> None:
    *_, last = path.read_text(encoding="utf-8").rstrip().split("\n\n")
    assert last.startswith("Next: ")
    assert 1 <= last.count("](") <= 2
