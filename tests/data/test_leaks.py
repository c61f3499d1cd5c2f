"""What a site's replies say: no name that few examples share, and no value, path or column."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from parametrize import at_night
from PIL import Image
from sgd_clients import linear, random_client_data, sgd_trainer

from fairflower.arrays import record_of
from fairflower.client_app import app
from fairflower.clients import make_client_app
from fairflower.config import RunConfig
from fairflower.config.site import NODE_KEYS
from fairflower.data.federation import Federation
from fairflower.data.sites import open_site
from fairflower.engines.inline import InlineGrid
from fairflower.flower_compat import is_supernode, set_task_identity
from fairflower.registry import CLIENTS
from fairflower.server.evaluation import CentralizedEvaluator

#: Words that stand only in a site's files and in their names.
SECRET = "MEIER_1961-04-01"
TEXTS = {"data.name": "texts", "model.name": "embedding-bag", "evaluate.by": "clients"}


def grid(*nodes: dict[str, Any]) -> InlineGrid:
    inline_grid = InlineGrid(app, len(nodes))
    for context, node in zip(inline_grid.contexts.values(), nodes, strict=True):
        context.node_config = {k: str(v) if isinstance(v, Path) else v for k, v in node.items()}
    return inline_grid


def ask(node: dict[str, Any], kind: str = MessageType.QUERY, **records: Any) -> Message:
    """Send a real message to a node, and return its reply."""
    there = grid(node)
    (number,) = there.contexts
    (reply,) = there.send_and_receive([Message(RecordDict(records), number, kind)])
    return reply


def described(node: dict[str, Any], **settings: Any) -> Message:
    return ask(node, config=ConfigRecord(RunConfig.from_flat(settings).to_flat()))


def words(reply: Message) -> str:
    """Return all text in a reply."""
    if reply.has_error():
        return str(reply.error.reason)
    return json.dumps({name: repr(record) for name, record in reply.content.items()})


def refusal(reply: Message) -> str:
    """Return the text of an error reply, which must not contain the site's words."""
    assert reply.has_error()
    assert SECRET not in words(reply)
    assert "/" not in words(reply).partition("\nMessage: ")[2]
    return words(reply)


def table(path: Path, rows: Iterable[dict[str, object]]) -> dict[str, Any]:
    """Write a CSV file, and return the node config of its site."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return {"domain": "north", "data-dir": path.parent}


def people(count: int = 40, **changed: Callable[[int], object]) -> Iterable[dict[str, object]]:
    for k in range(count):
        row: dict[str, Any] = {"text": f"report {SECRET} {k}", "label": "ill" if k % 2 else "well"}
        row |= {"sex": "f" if k % 4 < 2 else "m", "name": f"{SECRET} {k % 30}"}
        yield row | {column: value(k) for column, value in changed.items()}


# --- names of groups and classes ---------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("count", [40, 400])
@pytest.mark.parametrize("column", ["text", "label", "split", "name"])
def test_a_run_cannot_read_a_column_of_a_site_as_groups(
    column: str, count: int, least: int, tmp_path: Path
) -> None:
    rows = people(
        count, split=lambda k: "test" if k % 3 else "train", name=lambda k: f"{SECRET}{k}"
    )
    site = table(tmp_path / "north.csv", rows)
    changes = {"data.groups": column, "data.smallest-group": least}
    assert refusal(described(site, **TEXTS, **changes))


def test_a_site_sends_the_names_of_groups_that_enough_examples_share(tmp_path: Path) -> None:
    site = table(tmp_path / "north.csv", people(sex=lambda k: "d" if k < 4 else "fm"[k % 4 > 1]))
    reply = refusal(described(site, **TEXTS, **{"data.groups": "sex"}))
    assert "1 of the 3 groups have fewer than 5 examples" in reply
    site = table(tmp_path / "north.csv", people(99, sex=lambda k: "fmd"[k % 9 % 3]))
    sent = json.loads(
        str(described(site, **TEXTS, **{"data.groups": "sex"}).content["node"]["site"])
    )
    assert sent["group_names"] == ["d", "f", "m"]


def fourth_sex(train: int, test: int) -> Iterable[dict[str, object]]:
    """Return people of three groups, of which one has so many training and test examples."""
    for k, row in enumerate(people(80)):
        rare = "d" if k % 40 < (test if k >= 40 else train) else row["sex"]
        yield row | {"sex": rare, "split": "test" if k >= 40 else "train"}


def test_site_and_run_must_agree_to_lower_the_number_and_each_can_raise_it(tmp_path: Path) -> None:
    site = table(tmp_path / "north.csv", fourth_sex(4, 4))

    def refused(own: int | None, least: int) -> bool:
        node = site if own is None else site | {"smallest-group": own}
        settings = {"data.groups": "sex", "data.smallest-group": least}
        return described(node, **TEXTS, **settings).has_error()

    assert [refused(None, 4), refused(5, 4), refused(4, 5), refused(4, 4)] == [True] * 3 + [False]
    assert refused(20, 4), "a site asks for more"
    assert refused(4, 20), "a run asks for more"


def test_a_class_of_a_single_row_does_not_leave_a_site(tmp_path: Path) -> None:
    rows = people(label=lambda k: SECRET if k == 7 else "ill" if k % 2 else "well")
    site = table(tmp_path / "texts" / "north.csv", rows)
    assert "1 of the 3 classes" in refusal(described(site, **TEXTS))
    site = table(tmp_path / "texts" / "north.csv", people())
    sent = json.loads(str(described(site, **TEXTS).content["node"]["site"]))
    assert sent["classes"] == ["ill", "well"]

    for name, count in (("ill", 9), ("well", 9), (SECRET, 3)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(count):
            Image.new("L", (4, 4), k).save(tmp_path / "images" / name / f"{k}.png")
    images = {"data.name": "images", "evaluate.by": "clients"}
    site = {"domain": "north", "data-dir": tmp_path / "images"}
    assert "1 of the 3 classes" in refusal(described(site, **images))

    (tmp_path / "npz").mkdir()
    y = np.array([0, 1] * 10 + [4711])  # the largest label is the number of classes
    x = np.zeros((len(y), 4, 4), np.uint8)
    np.savez(tmp_path / "npz" / "x.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    site = {"domain": "north", "data-dir": tmp_path / "npz"}
    reply = described(site, **{"data.name": "npz", "evaluate.by": "clients"})
    assert "4711" not in refusal(reply)
    assert "4712" not in words(reply)
    y = np.array([0, 1] * 10 + [2])  # three classes, of which one is rare
    np.savez(tmp_path / "npz" / "x.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    assert not described(site, **{"data.name": "npz", "evaluate.by": "clients"}).has_error()


def test_classes_and_groups_that_the_code_declares_may_be_rare(digits_dir: str) -> None:
    node = {"domain": "usps", "data-dir": digits_dir, "smallest-group": 10_000}
    settings = {"data.name": "digits", "data.dir": digits_dir, "evaluate.by": "clients"}
    assert not described(node, **settings).has_error()


def test_a_site_refuses_rare_names_in_every_kind_of_message(tmp_path: Path) -> None:
    """A server that sends no query, but a description with a guess, learns not whether it holds."""
    settings = RunConfig.from_flat(TEXTS | {"data.groups": "name"})
    sent = table(tmp_path / "there" / "x.csv", people(80, name=lambda k: "ab"[k % 2]))
    reply = described(sent, **TEXTS, **{"data.groups": "name"})
    site = table(tmp_path / "here" / "x.csv", people(30))
    replies = set()
    for guess in (f"{SECRET} 3", "SCHULZ"):
        there = json.loads(str(reply.content["node"]["site"])) | {"group_names": ["a", guess]}
        config = settings.to_flat() | {"federation": json.dumps(there), "client-id": 0}
        federation = Federation.from_json(json.dumps(there), tmp_path)
        model = record_of(model_arrays(settings, federation))
        for kind in ("train", "train.measure", "evaluate"):
            config |= {"server-round": 1, "run-id": guess}
            got = ask(site, kind, arrays=model, config=ConfigRecord(config))
            replies.add(refusal(got).partition("\nMessage: ")[2])
    (text,) = replies
    assert "30 of the 30 groups have fewer than 5 examples" in text


@pytest.mark.parametrize(("train", "test"), [(4, 9), (9, 4), (1, 9), (9, 1)])
def test_a_group_of_few_people_in_one_split_is_not_counted(
    train: int, test: int, tmp_path: Path
) -> None:
    """Six counts of one test person are this person's label and prediction."""
    groups = {"data.groups": "sex"}
    site = table(tmp_path / "north.csv", fourth_sex(train, test))
    split = "train" if train < test else "test"
    reply = refusal(described(site, **TEXTS, **groups))
    assert f"1 of the groups of people have too few {split} examples" in reply
    own = site | {"smallest-group": 1}
    assert described(own, **TEXTS, **groups).has_error(), "the run must agree"
    assert not described(own, **TEXTS, **groups, **{"data.smallest-group": 1}).has_error()


def model_arrays(settings: RunConfig, federation: Federation) -> Any:
    return CentralizedEvaluator(settings, federation).arrays()


# --- errors ------------------------------------------------------------------------------------


def headless(folder: Path) -> None:
    (folder / "x.csv").write_text(f"{SECRET} has a cough,ill,f\n" * 9)


def wrong_split(folder: Path) -> None:
    table(folder / "x.csv", people(split=lambda k: SECRET if k == 4 else "train"))


def no_label(folder: Path) -> None:
    table(folder / "x.csv", people(label=lambda k: "" if k == 4 else "ill"))


def no_group(folder: Path) -> None:
    table(folder / "x.csv", people(sex=lambda k: "" if k == 4 else "f"))


def too_many_values(folder: Path) -> None:
    table(folder / "x.csv", people())
    with (folder / "x.csv").open("a") as file:
        file.write(f"a,b,c,d,{SECRET}\n")


def not_utf8(folder: Path) -> None:
    (folder / "x.csv").write_bytes(f"text,label\n{SECRET},ill\n".encode("utf-16"))


def alike(folder: Path) -> None:
    table(folder / "x.csv", people(label=lambda k: f"{SECRET}" + " " * (k % 2)))


def named_like_patients(folder: Path) -> None:
    for k in range(2):
        table(folder / f"{SECRET} {k}.csv", people())


def one_class(folder: Path) -> None:
    table(folder / f"{SECRET}.csv", people(label=lambda k: SECRET))


ERRORS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no header": (headless, "a table: found 3 columns; missing: text, label, sex."),
    "a wrong split": (wrong_split, "line 6 of a table: found another split; expected train or"),
    "no label": (no_label, "line 6 of a table has no label"),
    "no group": (no_group, "line 6 of a table has no sex (data.groups)"),
    "more values": (too_many_values, "line 42 of a table has more values than the header"),
    "an encoding": (not_utf8, "a file cannot be read (UnicodeDecodeError)"),
    "similar classes": (alike, "DataError (files.py, line "),
    "files' names": (named_like_patients, "data-dir has 2 domains, and none has the name"),
    "no files": (lambda folder: None, "DataError (folders.py, line "),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_an_error_names_the_kind_of_fault_and_the_log_of_the_site_the_rest(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write, expected = ERRORS[fault]
    folder = tmp_path / SECRET
    folder.mkdir()
    write(folder)
    node = {"domain": "north", "data-dir": folder}
    reply = described(node, **TEXTS, **{"data.groups": "sex"})
    assert f"Message: site 'north': {expected}" in refusal(reply)
    assert SECRET in caplog.text
    caplog.clear()
    simulated = {"partition-id": 0, "num-partitions": 1}
    settings = {**TEXTS, "data.groups": "sex", "data.clients-per-domain": 1}
    if fault != "files' names":  # a simulation has all of them
        assert SECRET in words(described(simulated, **settings, **{"data.dir": str(folder)}))


def test_an_unreadable_image_is_named_only_in_the_log_of_the_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
        for k in range(6):
            Image.new("L", (4, 4), k).save(tmp_path / name / f"{k}.png")
    (tmp_path / "ill" / f"{SECRET}_melanoma.png").write_bytes(b"MEIER")
    site = {"domain": "north", "data-dir": tmp_path}
    reply = refusal(described(site, **{"data.name": "images", "evaluate.by": "clients"}))
    assert "melanoma" not in reply
    assert "a file cannot be read" in reply
    assert f"{SECRET}_melanoma.png cannot be read as an image" in caplog.text
    nested = tmp_path / "ill" / SECRET
    nested.mkdir()
    Image.new("L", (4, 4)).save(nested / "0.png")
    refusal(described(site, **{"data.name": "images", "evaluate.by": "clients"}))


@pytest.mark.parametrize(
    "arrays",
    [
        {f"{SECRET}_train": np.arange(9)},
        {"x_train": np.array([SECRET, None], object)},
        {"x_train": np.zeros((9, 4, 4), np.uint8), "y_train": np.array([SECRET] * 9)},
        {"x_train": np.zeros((9, 4, 4), np.uint8), "y_train": np.arange(9) - 1961},
    ],
)
def test_an_array_that_cannot_be_read_stays_at_the_site(
    arrays: dict[str, Any], tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    site = {"domain": "north", "data-dir": tmp_path}
    reply = described(site, **{"data.name": "npz", "evaluate.by": "clients"})
    assert "1961" not in refusal(reply)


def fails_with_labels(logits: Any, labels: Any) -> float:
    raise KeyError(f"{SECRET} has the labels {labels}")


def test_a_failing_metric_says_why_only_in_the_log_of_the_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RunConfig.from_flat(TEXTS | {"evaluate.metrics": f"{__name__}:fails_with_labels"})
    site = table(tmp_path / "x.csv", people())
    text = str(described(site, **TEXTS).content["node"]["site"])
    model = record_of(model_arrays(settings, Federation.from_json(text, tmp_path)))
    config = settings.to_flat() | {"federation": text, "client-id": 0, "server-round": 1}
    reply = ask(site, "evaluate", arrays=model, config=ConfigRecord(config))
    assert not reply.has_error()
    assert "has the labels" in caplog.text
    assert "has the labels" not in words(reply)
    assert "it failed; the site's own log says why" in words(reply)


# --- clients of a common data set, and node configs ---------------------------------------------


def test_supernodes_that_share_a_data_set_keep_its_paths_and_rare_names(tmp_path: Path) -> None:
    node = table(tmp_path / SECRET / "north.csv", people())
    node = {"partition-id": 0, "num-partitions": 1, "data-dir": node["data-dir"]}
    settings = {**TEXTS, "data.clients-per-domain": 1}
    assert SECRET not in words(described(node, **settings))
    refusal(described(node, **settings, **{"data.groups": "name"}))


def test_a_supernode_is_recognized_by_its_process_or_its_node_config() -> None:
    node = next(iter(grid({"partition-id": 0, "num-partitions": 1}).contexts.values()))
    assert not is_supernode(node)
    set_task_identity(1, node.node_id)  # as Flower does in a SuperNode's process
    assert is_supernode(node)
    set_task_identity()
    for key in NODE_KEYS - {"partition-id", "num-partitions"}:
        assert is_supernode(Context(1, 1000, {key: "x"}, RecordDict(), {}))


def test_a_site_tests_another_sites_model_only_if_it_agrees(tmp_path: Path) -> None:
    site = table(tmp_path / "x.csv", people())
    asked = ConfigRecord(RunConfig.from_flat(TEXTS).to_flat() | {"own-model": "test"})
    text = refusal(ask(site, "evaluate", config=asked, arrays=record_of({})))
    assert "tests no other site's model: test-others-models is not true" in text


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("secure_aggregation", True, "Did you mean 'secure-aggregation'?"),
        ("Secure-Aggregation", True, "Did you mean 'secure-aggregation'?"),
        ("secure-agregation", True, "Did you mean 'secure-aggregation'?"),
        ("data_dir", "/data", "Did you mean 'data-dir'?"),
        ("smallest_group", 9, "Did you mean 'smallest-group'?"),
        ("secure-aggregation", "yes", "expected true or false"),
        ("share-own-model", "yes", "expected true or false"),
        ("test-others-model", True, "Did you mean 'test-others-models'?"),
        ("smallest-group", 0, "expected a whole number above 0"),
        ("smallest-group", True, "expected a whole number above 0"),
    ],
)
@pytest.mark.parametrize("kind", ["query", "train", "train.measure", "evaluate"])
def test_a_wrong_node_config_is_refused_by_the_site(
    kind: str, key: str, value: Any, hint: str, tmp_path: Path
) -> None:
    site = table(tmp_path / "x.csv", people()) | {key: value}
    config = ConfigRecord(RunConfig.from_flat(TEXTS).to_flat())
    text = refusal(ask(site, kind, config=config))
    assert key in text
    assert hint in text


class Unkind(Exception):
    public = SECRET

    def __str__(self) -> str:
        raise RuntimeError(SECRET)


def faulty(kind: str) -> None:
    ring = ValueError(SECRET)
    ring.__cause__ = ring
    cause = {"not raised": ValueError(SECRET), "own text": Unkind(), "ring": ring}[kind]
    raise KeyError(SECRET) from cause


@pytest.mark.parametrize("kind", ["not raised", "own text", "ring"])
def test_an_error_of_an_unusual_kind_stays_at_the_site(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairflower.data.files.check_columns", lambda *_: faulty(kind))
    monkeypatch.setattr("fairflower.data.files.explained", lambda *_: nullcontext())
    site = table(tmp_path / "x.csv", people())
    expected = "Unkind" if kind == "own text" else "ValueError"
    assert f"Message: site 'north': {expected} (the" in refusal(described(site, **TEXTS))


def test_an_app_of_others_may_have_keys_of_its_own_and_sends_its_errors() -> None:
    def trainer(context: Context, config: Any) -> Any:
        if "my-key" in context.node_config:
            return sgd_trainer(linear(), data=random_client_data())
        raise ValueError("a text of theirs")

    there = InlineGrid(make_client_app(trainer), 2)
    for context, node in zip(there.contexts.values(), ({"my-key": 1}, {"x": 1}), strict=True):
        context.node_config = node
    model = record_of(sgd_trainer(linear()).send())
    content = RecordDict({"arrays": model, "config": ConfigRecord({"server-round": 1})})
    replies = there.send_and_receive([Message(content, k, "train") for k in there.contexts])
    first, second = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
    assert not first.has_error()
    assert "a text of theirs" in words(second)


# --- replies -----------------------------------------------------------------------------------

#: Client -> array records beside the model, as in the table of docs/privacy.md.
BESIDE = {"scaffold": {"control"}, "fedproc": {"prototypes"}, "fedproto": {"prototypes"}}
BESIDE |= {"fedmix": {"averages"}, "fpl": {"clusters"}, "fedrdn": {"statistics"}}
BESIDE |= {"fedplvm": {"clusters"}}


def npz_site(folder: Path, size: int = 24) -> dict[str, Any]:
    x = np.random.default_rng(0).integers(0, 256, (size, 16, 16), np.uint8)
    y = np.arange(size) % 2
    np.savez(folder / "x.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    return {"domain": "north", "data-dir": folder}


def replies_of(
    site: dict[str, Any],
    tmp_path: Path,
    kinds: Iterable[str],
    *,
    checked: bool = True,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a site's replies to a run's messages, with their model."""
    flat = {"data.name": "npz", "evaluate.by": "clients", "train.local-epochs": 1} | changes
    settings = RunConfig.from_flat(flat)
    text = str(described(site, **flat).content["node"]["site"])
    there = InlineGrid(app, 1)
    setup_model = model_arrays(settings, Federation.from_json(text, tmp_path))
    config = settings.to_flat() | {"federation": text, "client-id": 0, "server-round": 1}
    config |= {"run-id": "0" * 32} | (extra or {})
    for context in there.contexts.values():
        context.node_config = {k: str(v) if isinstance(v, Path) else v for k, v in site.items()}
    for kind in kinds:
        content = {"arrays": record_of(setup_model), "config": ConfigRecord(config)}
        (reply,) = there.send_and_receive([Message(RecordDict(content), 1000, kind)])
        assert not checked or not reply.has_error(), reply.error
        yield setup_model, reply


PLAIN = [name for name in CLIENTS if name != "fedgc"]


@pytest.mark.parametrize(
    ("split", "settings"),
    [
        ("train", {"data.examples-per-client": 1}),
        ("train", {"data.fraction": 0.15}),
        ("train", {"data.validation-fraction": 0.9}),
        ("test", {"data.test-examples": 4}),
        ("validation", {"data.validation-fraction": 0.1}),
    ],
)
def test_a_run_cannot_make_a_site_use_a_single_example(
    split: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    npz = {"data.name": "npz", "evaluate.by": "clients"}
    reply = refusal(described(npz_site(tmp_path), **npz, **settings))
    assert f"of this site's {split} examples, fewer than 5" in reply
    ours = npz_site(tmp_path) | {"smallest-group": 1}
    assert not described(ours, **npz, **settings, **{"data.smallest-group": 1}).has_error()


def test_a_site_that_has_few_examples_may_use_all_of_them(tmp_path: Path) -> None:
    site = npz_site(tmp_path, 4)
    (reply,) = [reply for _, reply in replies_of(site, tmp_path, ["train"])]
    assert reply.content["metrics"]["num-examples"] == 4


@pytest.mark.parametrize(
    ("settings", "rare", "refused"),
    [
        ({"client.name": "fedmix", "train.batch-size": 1}, 12, True),
        ({"client.name": "fedmix", "train.batch-size": 5}, 12, False),
        ({"client.name": "harmofl", "train.batch-size": 4}, 12, True),
        at_night({"client.name": "harmofl", "train.batch-size": 5}, 12, False),
        at_night({"client.name": "sgd", "train.batch-size": 1}, 1, False),
        ({"client.name": "fedproto"}, 1, True),
        ({"client.name": "fedproc"}, 4, True),
        ({"client.name": "fedrdn"}, 1, False),
        ({"client.name": "fedplvm"}, 12, True),
        at_night({"client.name": "fedproto"}, 5, False),
        ({"strategy.name": "fedgcr"}, 1, True),
        at_night({"strategy.name": "fedgcr"}, 5, False),
    ],
)
def test_a_site_sends_no_mean_of_few_examples(
    settings: dict[str, Any], rare: int, refused: bool, tmp_path: Path
) -> None:
    site = npz_site(tmp_path)
    with np.load(tmp_path / "x.npz") as file:
        changed = {**file, "y_train": np.array([0] * (24 - rare) + [1] * rare)}
    np.savez(tmp_path / "x.npz", **changed)
    for more in ({}, {"data.smallest-group": 1}):
        node = site | {key.rpartition(".")[2]: value for key, value in more.items()}
        measure = {"measure": "received_representation"} if "strategy.name" in settings else {}
        run = {"extra": measure, "checked": False, "train.local-epochs": 1}
        ((_, reply),) = replies_of(node, tmp_path, ["train"], **run, **settings, **more)
        if refused and not more:
            assert "fewer than 5 examples" in refusal(reply)
        else:
            assert not reply.has_error(), reply.error


@pytest.mark.parametrize(
    ("model", "classes"),
    [("cProfile:run", "open({mark!r}, 'w')"), ("shutil:rmtree", "{folder}")],
)
@pytest.mark.parametrize("kind", ["train", "evaluate", "train.measure"])
def test_a_message_cannot_pass_its_text_to_a_function_that_it_names(
    kind: str, model: str, classes: str, tmp_path: Path
) -> None:
    """Messages name the network and have the number of classes, its first argument."""
    site, mark = npz_site(tmp_path), tmp_path / "mark"
    npz = {"data.name": "npz", "evaluate.by": "clients"}
    text = str(described(site, **npz).content["node"]["site"])
    (folder := tmp_path / "precious").mkdir()
    settings = RunConfig.from_flat(npz)
    for value in (classes.format(mark=str(mark), folder=folder), [1], True, 2.5, {}, 0):
        sent = json.dumps(json.loads(text) | {"num_classes": value})
        config = settings.to_flat() | {"federation": sent, "client-id": 0, "server-round": 1}
        arrays = record_of(model_arrays(settings, Federation.from_json(text, tmp_path)))
        refusal(ask(site, kind, arrays=arrays, config=ConfigRecord(config | {"model.name": model})))
        assert folder.is_dir()
        assert not mark.exists()


@pytest.mark.few(7)
@pytest.mark.parametrize("client", PLAIN)
def test_replies_have_only_the_documented_records(client: str, tmp_path: Path) -> None:
    changes = {"client.name": client, "model.name": "cnn:norm=batch", "train.batch-size": 8}
    replies = replies_of(npz_site(tmp_path), tmp_path, ("train", "evaluate"), **changes)
    for (model, reply), kind in zip(replies, ("train", "evaluate"), strict=True):
        arrays = {"arrays", *BESIDE.get(client, set())} if kind == "train" else set()
        assert set(reply.content.array_records) == arrays
        assert set(reply.content.metric_records) == {"metrics"}
        assert not reply.content.config_records
        allowed = {"num-examples", "client-id"}
        allowed |= (
            {"train_loss", "state-round"}
            if kind == "train"
            else {"eval_loss", "accuracy", "personal_accuracy"}
        )
        assert set(reply.content.metric_records["metrics"]) <= allowed
        if kind == "train":
            assert set(reply.content.array_records["arrays"]) <= set(model)


def test_harmofl_sends_the_mean_spectrum_of_a_single_batch(tmp_path: Path) -> None:
    site = npz_site(tmp_path)
    changes = {"client.name": "harmofl", "train.batch-size": 100, "data.examples-per-client": 16}
    ((_, reply),) = replies_of(site, tmp_path, ["train"], **changes)
    sent = reply.content.array_records["arrays"]["amplitude_norm.running_mean"].numpy()
    flat = {"data.name": "npz", "evaluate.by": "clients", **changes}
    config = replace(RunConfig.from_flat(flat).data, dir=str(tmp_path))
    x, _ = open_site(config, "north").train(0)
    expected = np.abs(np.fft.rfft2(x / 255)).mean(0)
    np.testing.assert_allclose(sent, expected, rtol=1e-3, atol=1e-3)


def test_patients_on_both_sides_are_counted_for_the_server_and_not_named(tmp_path: Path) -> None:
    split = {"split": lambda k: "test" if k % 4 else "train"}
    site = table(tmp_path / "north.csv", people(**split))
    reply = refusal(described(site, **TEXTS, **{"data.patient": "name"}))
    assert "5 of 30 patients have training and test examples. Correct the split" in reply
    sent = described(site, **TEXTS, **{"data.patient": "sex", "data.redraw": "rows"})
    assert not sent.has_error()
    assert SECRET not in words(sent)


@pytest.mark.parametrize(
    ("file", "patient", "said"),
    [
        (f"{SECRET}.png", "", "line 14 of a table: a path is no image in the folder, or is listed"),
        (f"../{SECRET}.png", "", "line 14 of a table: a path is no image in the folder"),
        (f"{SECRET}/0.png", "", "line 14 of a table: a path is no image in the folder, or is"),
        (f"{SECRET}/12.png", SECRET, "a table: found 3 columns; missing: MEIER"),
        (f"{SECRET}/12.png", "PatientID", "'PatientID': 13 of 13 images are no DICOM files with a"),
    ],
)
def test_a_wrong_manifest_is_explained_to_the_server_without_its_paths(
    file: str, patient: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / SECRET).mkdir()
    for k in range(13):
        Image.new("L", (4, 4), k).save(tmp_path / SECRET / f"{k}.png")
    rows = [{"file": f"{SECRET}/{k}.png", "label": "ab"[k % 2], "who": SECRET} for k in range(12)]
    site = table(tmp_path / "manifest.csv", [*rows, {"file": file, "label": "a", "who": SECRET}])
    images = {"data.name": "images", "evaluate.by": "clients", "data.patient": patient}
    reply = described(site, **images)
    assert said.partition(" MEIER")[0] in (words(reply) if patient == SECRET else refusal(reply))
