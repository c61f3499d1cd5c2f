"""Runs are grouped into methods; differences that prevent a comparison are noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import (
    Page,
    constant,
    edit,
    give_clients,
    make_run,
    printed_tables,
    runs_with,
    tables_of,
)

from fairflower.report import methods, read_run, read_summary, write_report, write_summary
from fairflower.report.analysis import analyze
from fairflower.report.contrasts import against_plain, contrasts_of
from fairflower.report.figures.comparison import _sketches
from fairflower.report.methods import group_runs
from fairflower.report.notes import notes
from fairflower.report.tables import (
    score_table,
)


def test_runs_with_different_settings_are_noted_and_not_compared(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform"),
        make_run(tmp_path / "h", constant(a=0.6, b=0.9), label="fedheal", config="momentum = 0.5"),
    ]
    note = "The runs differ in train.momentum: 0.9 (uniform), 0.5 (fedheal)."
    assert note in printed_tables(*folders)
    assert "fedheal: no FedAvg or Uniform run with the same settings" in printed_tables(*folders)
    page = tables_of(*folders).text
    assert note in page
    assert "train.momentum = 0.5, round 6" in page


def test_methods_that_reached_different_rounds_are_noted_and_not_compared(tmp_path: Path) -> None:
    uniform = make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform")
    short = make_run(tmp_path / "h", constant(4, a=0.6, b=0.9), status="stopped")
    edit("config.toml", "num-server-rounds = 3", "num-server-rounds = 6")(short)
    text = printed_tables(uniform, short)
    assert (
        "The runs reached different rounds: 6 (uniform), 3 (fedheal). Only methods that "
        "reached the same round are compared." in text
    )
    assert "fedheal: no FedAvg or Uniform run with the same settings, rounds and seeds" in text
    (comparison,) = group_runs(map(read_run, [uniform, short]))
    groups = score_table(comparison, 5).groups
    assert [group.heading for group in groups] == ["round 6", "round 3"]


def test_federations_without_a_finished_run_of_a_method_are_named(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"{label}{i}",
            constant(a=0.5 + 0.01 * i, b=0.9),
            label=label,
            seed=i,
        )
        for label, there in (("uniform", range(7)), ("fedheal", (0, 1, 3, 5, 6)))
        for i in there
    ]
    for folder in folders:
        number = folder.name.removeprefix("uniform").removeprefix("fedheal")
        edit("config.toml", "[data]", f"[data]\nseed = {number}")(folder)
    assert (
        "fedheal has no finished run for federations 2 and 4, so its differences use only the "
        "other 5." in printed_tables(*folders)
    )
    assert "no finished run" not in printed_tables(*folders[:7])
    text = printed_tables(*folders[4:7], *folders[7:])  # federations 4 to 6, and 0, 1, 3, 5, 6
    assert "uniform has no finished run for federations 0, 1 and 3, so its differences use" in text
    assert text.count("only the other 2.") == 2


def test_values_with_different_last_rounds_are_not_a_sweep(tmp_path: Path) -> None:
    folders = []
    for t, last, status in (
        ("0.0", 6, "completed"),
        ("0.5", 6, "completed"),
        ("1.0", 3, "stopped"),
    ):
        values = constant(last + 1, a=0.5, b=0.9)
        name = "fedequilibria"
        folder = make_run(tmp_path / t, values, label=f"t{t}", strategy=name, status=status)
        edit("config.toml", "[train]", f"t = {t}\n[train]")(folder)
        edit("config.toml", f"rounds = {last}", "rounds = 6")(folder)
        folders.append(folder)
    assert methods.sweeps(group_runs(map(read_run, folders))[0]) == []


def test_captions_name_validation_examples(tmp_path: Path) -> None:
    usual = make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform")
    own = make_run(tmp_path / "h", constant(a=0.5, b=0.9), config="[evaluate]\ntest = false\n")
    edit("history.csv", ",domain,", ",validation,")(own)
    assert "Validation accuracy in %" in printed_tables(own)
    assert "Test or validation accuracy in %" in printed_tables(usual, own)


def test_captions_on_clients_without_tests_name_validation_examples(tmp_path: Path) -> None:
    own = make_run(
        tmp_path / "r",
        constant(a=0.5, b=0.9),
        clients={6: [0.4, 0.6, 0.8, 1.0]},
        personal=constant(a=0.6, b=0.9),
        config='[evaluate]\ntest = false\nby = "clients"\n',
    )
    edit("history.csv", ",domain,", ",validation,")(own)
    edit("history.csv", ",client,", ",client-validation,")(own)
    with (own / "history.csv").open("a") as file:
        file.writelines(f"6,client-validation,{k},personal_accuracy,0.{k}\n" for k in range(4))
    (comparison,) = group_runs([read_run(own)])
    drafts = {d.name: d for d in _sketches(comparison, contrasts_of(comparison))}
    assert "a client on its own validation data" in drafts["clients"].caption
    text = tables_of(own).text
    assert text.count("Each client tests its personal model on its own validation data") == 2
    assert "own test data" not in text


def test_a_note_that_all_runs_of_a_method_share_appears_once(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{s}", constant(a=0.5, b=0.9), seed=s) for s in range(3)]
    for run, dropped in zip(runs, ((), (), ("1",)), strict=True):
        facts = json.loads((run / "run.json").read_text())
        privacy = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": 1.5, "clip": 1.0}
        privacy["number_noise_multiplier"] = 0.0
        facts["privacy"] = {**privacy, "numbers": 0, "noise": "secret", "rounds": 1}
        facts["halted_rounds"] = dict.fromkeys(dropped, "its disk is full")
        (run / "run.json").write_text(json.dumps(facts))
    (chapter,) = analyze([read_run(run) for run in runs]).chapters
    private = [note for note in chapter.notes if "differentially private" in note]
    assert [note.partition(": ")[0] for note in private] == ["fedheal"]
    halted = [note for note in chapter.notes if "its disk is full" in note]
    assert [note.partition(": ")[0] for note in halted] == ["fedheal, seed 2"]


def test_a_note_names_three_methods_and_counts_the_others(tmp_path: Path) -> None:
    names = ["fedavg", "uniform", "fedheal", "term", "afl", "fedism"]
    runs = [make_run(tmp_path / name, constant(a=0.5, b=0.9), label=name) for name in names]
    edit("config.toml", 'engine = "ray"', 'engine = "ray"\nfraction-train = 0.5')(runs[0])
    (note,) = (n for n in analyze(map(read_run, runs)).chapters[0].notes if "fraction-train" in n)
    assert "0.5 (fedavg)" in note
    assert "(uniform, fedheal, term, 2 more)" in note


def test_engine_workers_and_explicit_defaults_are_not_a_difference(tmp_path: Path) -> None:
    ray = make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform")
    inline = make_run(tmp_path / "h", constant(a=0.6, b=0.9), label="fedheal")
    edit("config.toml", 'engine = "ray"', 'engine = "inline"\nworkers = 2')(inline)
    edit("config.toml", '"fedheal"', '"fedheal"\ntau = "default"')(inline)
    (only,) = group_runs([read_run(ray), read_run(inline)])
    assert not only.differing
    other = make_run(tmp_path / "o", constant(a=0.6, b=0.9), label="fedheal", seed=1)
    edit("config.toml", '"fedheal"', '"fedheal"\ntau = 0.3')(other)  # its default
    (only,) = group_runs(map(read_run, [ray, inline, other]))
    assert [(method.name, len(method.runs)) for method in only.methods][1:] == [("fedheal", 2)]
    assert "points against Uniform" in printed_tables(ray, inline)


def test_methods_of_the_same_name_are_distinguished_by_their_settings(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "1", constant(a=0.5, b=0.9), config="momentum = 0.5"),
        make_run(tmp_path / "2", constant(a=0.6, b=0.9), config="momentum = 0.9"),
    ]
    (only,) = group_runs(map(read_run, folders))
    assert [m.name for m in only.methods] == [
        "fedheal (train.momentum=0.5)", "fedheal (train.momentum=0.9)",
    ]  # fmt: skip


def test_older_runs_of_a_seed_and_shorter_runs_are_left_out(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", constant(a=0.1, b=0.9), started="2025-01-01T00:00:00+00:00")
    new = make_run(tmp_path / "new", constant(a=0.5, b=0.9))
    short = make_run(tmp_path / "short", constant(3, a=0.2, b=0.9), seed=1, status="stopped")
    edit("config.toml", "num-server-rounds = 2", "num-server-rounds = 6")(short)
    (only,) = group_runs(map(read_run, [old, short, new]))
    (method,) = only.methods
    assert [run.path.name for run in method.runs] == ["new"]
    assert {run.path.name for run, _ in method.left_out} == {"old", "short"}
    text = printed_tables(old, short, new)
    assert "(stopped after round 2 of 6), is left out" in text
    assert "a newer run has the same seed" in text


@pytest.mark.usefixtures("undrawn")
def test_runs_on_other_domains_are_a_separate_comparison(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "1", constant(a=0.5, b=0.9)),
        make_run(tmp_path / "2", constant(c=0.5)),
    ]
    write_report([read_run(folder) for folder in folders], tmp_path / "out")
    page = Page((tmp_path / "out" / "index.html").read_text("utf-8"))
    assert len([attrs for tag, attrs in page.tags if tag == "section"]) == 2
    # A single domain has no standard deviation with ddof 1, so the figure is not drawn.
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert "1-std.png" in names
    assert "2-std.png" not in names
    assert "2-average.svg" in names


def test_changed_data_are_noted_and_all_versions_listed(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "1", constant(a=0.5, b=0.9), sources=["one"]),
        make_run(tmp_path / "2", constant(a=0.5, b=0.9), label="uniform", sources=["two"],
                 versions={"flwr": "1.32.0"}),
    ]  # fmt: skip
    text = printed_tables(*folders)
    assert "same data settings had different data or clients" in text
    assert "; flwr 1.32.0 and " in text
    message = "same data settings had different data or clients"
    moved = [
        make_run(tmp_path / label, constant(a=0.5, b=0.9), label=label, sources=[source])
        for label, source in (("fedavg", "/here/digits"), ("term", "/there/digits"))
    ]
    assert message not in printed_tables(*moved), "the same file in another folder"
    give_clients(moved[0], a=2, b=2)
    assert message in printed_tables(*moved), "other examples of the clients"


def test_a_report_without_uniform_weights_says_so(tmp_path: Path) -> None:
    said, alone = "Uniform weights are not among the runs", runs_with(tmp_path, "x", [0.5])
    two = runs_with(tmp_path, "fedavg", [0.5, 0.5])
    assert said in printed_tables(*two)
    assert said not in printed_tables(*two, *runs_with(tmp_path, "uniform", [0.5]))
    text = printed_tables(*alone)
    assert said not in text, "nobody asked for a comparison"
    assert "to compare with" not in text


def test_runs_on_different_examples_are_named_and_not_compared(tmp_path: Path) -> None:
    """The data settings are equal, but the files in data.dir changed between the runs."""
    folders = [
        make_run(tmp_path / f"{label}{seed}", constant(a=a, b=0.9), label=label, seed=seed,
                 digest=digest)
        for label, a, digest in (("uniform", 0.5, "one"), ("term", 0.6, "one"), ("x", 0.7, "two"))
        for seed in range(2)
    ]  # fmt: skip
    again = make_run(tmp_path / "again", constant(a=0.1, b=0.9), label="uniform", seed=2,
                     digest="two")  # fmt: skip
    runs = [read_run(folder) for folder in [*folders, again]]
    (comparison,) = group_runs(runs)
    assert [(method.name, len(method.runs)) for method in comparison.methods] == [
        ("uniform", 2),
        ("uniform (examples=version 2)", 1),
        ("term", 2),
        ("x", 2),
    ]
    first, second, term, x = comparison.methods
    assert comparison.baseline(term, "uniform") is first
    assert comparison.baseline(x, "uniform") is second
    note = "The runs differ in examples: version 1 (uniform, term), version 2 (uniform (examples"
    assert note in " ".join(printed_tables(*folders, again).split())
    write_summary(runs, tmp_path / "x.csv")
    (summarized,) = group_runs(read_summary(tmp_path / "x.csv"))
    assert [method.name for method in summarized.methods] == [m.name for m in comparison.methods]


def test_one_run_with_other_examples_does_not_split_the_other_methods(tmp_path: Path) -> None:
    def drawn(label: str, seed: int, digest: str) -> Path:
        folder = make_run(tmp_path / f"{label}{seed}{digest}", constant(a=0.5, b=0.9), label=label,
                        seed=seed, digest=digest)  # fmt: skip
        edit("config.toml", "[data]\n", f"[data]\nseed = {seed}\n")(folder)
        return folder

    folders = [drawn(label, f, f"of {f}") for label in ("uniform", "term") for f in range(3)]
    folders.append(drawn("x", 1, "of another folder"))
    (comparison,) = group_runs(map(read_run, folders))
    assert [(m.name, len(m.runs)) for m in comparison.methods] == [
        ("uniform", 3),
        ("term", 3),
        ("x", 1),
    ]
    assert comparison.baseline(comparison.methods[2], "uniform") is None
    assert comparison.differing["examples"] == {
        "uniform": "version 1", "term": "version 1", "x": "version 2",
    }  # fmt: skip


def test_extra_seeds_on_one_federation_do_not_split_runs_on_several_federations(
    tmp_path: Path,
) -> None:
    def drawn(name: str, seed: int, federation: int) -> Path:
        folder = make_run(tmp_path / name, constant(a=0.5, b=0.9), label="uniform", seed=seed)
        edit("config.toml", "[data]\n", f"[data]\nseed = {federation}\n")(folder)
        return folder

    folders = [drawn(f"f{number}", number, number) for number in range(3)]
    folders += [drawn("s3", 3, 0), drawn("s4", 4, 0)]
    (comparison,) = group_runs(map(read_run, folders))
    assert [(m.federations, [run.seed for run in m.runs]) for m in comparison.methods] == [
        (True, [0, 1, 2]),
        (False, [3, 4]),
    ]


def test_several_seeds_per_federation_are_one_method_per_federation(tmp_path: Path) -> None:
    folders = []
    for federation in range(2):
        for seed in range(3):
            folder = make_run(tmp_path / f"{federation}-{seed}", constant(a=0.5, b=0.9), seed=seed)
            edit("config.toml", "[data]\n", f"[data]\nseed = {federation}\n")(folder)
            folders.append(folder)
    (comparison,) = group_runs(map(read_run, folders))
    assert [(m.federations, len(m.runs)) for m in comparison.methods] == [(False, 3)] * 2


def tuned_run(parent: Path, label: str, lr: float, tuned: str = "train.lr") -> Path:
    """Write a run whose settings ``tuned`` were tuned, and return its folder."""
    folder = make_run(parent / f"{label}{lr}", constant(a=lr, b=0.9), label=label)
    edit("config.toml", "lr = 0.01", f"lr = {lr}")(folder)
    edit("config.toml", "[data]", f'tuned = "{tuned}"\n[data]')(folder)
    return folder


def test_settings_tuned_for_each_method_are_not_a_difference(tmp_path: Path) -> None:
    folders = [
        tuned_run(tmp_path, "uniform", 0.1),
        tuned_run(tmp_path, "term", 0.2),
        tuned_run(tmp_path, "x", 0.3, ""),
    ]
    (comparison,) = group_runs(map(read_run, folders))
    uniform, term, x = comparison.methods
    assert comparison.baseline(term, "uniform") is uniform
    assert comparison.baseline(x, "uniform") is None, "it was not tuned"
    assert comparison.differing == {"train.lr": {"uniform": "tuned", "term": "tuned", "x": "0.3"}}
    write_summary(list(map(read_run, folders)), tmp_path / "x.csv")
    (summarized,) = group_runs(read_summary(tmp_path / "x.csv"))
    assert summarized.differing == comparison.differing
    text = " ".join(printed_tables(*folders).split())
    assert "no difference in settings: train.lr 0.1 (uniform), 0.2 (term)." in text


def fedprox_run(parent: Path, strategy: str, mu: float, tuned: str, **more: float) -> Path:
    """Write a run with FedProx and with arguments ``more`` of the strategy."""
    args = "".join(f":{key}={value}" for key, value in more.items())
    label = f"fedprox:mu={mu}+{strategy}{args}"
    config = f'[client]\nname = "fedprox"\nmu = {mu}\n'
    options = {"label": label, "strategy": strategy, "config": config}
    folder = make_run(parent / label, constant(a=0.5, b=0.9), **options)
    edit("config.toml", "[data]", f'tuned = "{tuned}"\n[data]')(folder)
    own = "".join(f"{key} = {value}\n" for key, value in more.items())
    edit("config.toml", f'name = "{strategy}"\n', f'name = "{strategy}"\n{own}')(folder)
    return folder


def test_methods_whose_client_was_tuned_for_each_are_compared(tmp_path: Path) -> None:
    tuned = "client.mu,strategy.tau"
    folders = [
        fedprox_run(tmp_path, "fedavg", 0.5, ""),
        fedprox_run(tmp_path, "fedavg", 0.1, tuned),
        fedprox_run(tmp_path, "fedavg", 0.2, tuned),
        fedprox_run(tmp_path, "fedheal", 0.2, tuned, tau=0.6),
        fedprox_run(tmp_path, "fedheal", 0.3, tuned, tau=0.7),
        fedprox_run(tmp_path, "fedheal", 0.5, "", tau=0.8),
        fedprox_run(tmp_path, "fedheal", 0.4, "", tau=0.9),
    ]
    (comparison,) = group_runs(map(read_run, folders))
    by_mu = {(m.strategy, m.config["client.mu"]): m for m in comparison.methods}
    baselines = [comparison.baseline(m, "fedavg") for m in comparison.methods[3:]]
    assert [b and b.config["client.mu"] for b in baselines] == [0.2, 0.1, 0.5, None]
    assert by_mu["fedheal", 0.2].client == "fedprox:mu=tuned"
    assert by_mu["fedheal", 0.2].aggregation == "fedheal:tau=tuned"
    assert by_mu["fedheal", 0.5].client == "fedprox:mu=0.5"
    assert not comparison.differing
    assert not any("Tuned for each method" in note for note in notes(comparison))


def test_a_tuned_client_is_compared_with_plain_training_under_a_tuned_strategy(
    tmp_path: Path,
) -> None:
    tuned = "client.mu,strategy.tau,train.lr"
    plain = [
        tuned_run(tmp_path, "fedheal", 0.1, tuned),
        tuned_run(tmp_path, "fedheal", 0.2, ""),
        tuned_run(tmp_path, "fedavg", 0.3, tuned),
        tuned_run(tmp_path, "fedavg", 0.2, ""),
    ]
    ours = [fedprox_run(tmp_path, "fedheal", 0.2, tuned, tau=0.6)]
    ours += [fedprox_run(tmp_path, "fedavg", 0.4, tuned)]
    (comparison,) = group_runs(map(read_run, [*plain, *ours]))
    ((client, other, pairs),) = against_plain(comparison)
    assert (client, other) == ("fedprox:mu=tuned", "sgd")
    assert {rule: pair[1].name for rule, pair in pairs.items()} == {
        "fedavg": "fedavg (train.lr=0.3)",
        "fedheal:tau=tuned": "fedheal (train.lr=0.1)",
    }


def test_a_tuned_baseline_is_used_for_untuned_methods_with_the_same_settings(
    tmp_path: Path,
) -> None:
    folders = [tuned_run(tmp_path, "uniform", 0.1), tuned_run(tmp_path, "term", 0.2)]
    folders += [tuned_run(tmp_path, "term", 0.1, ""), tuned_run(tmp_path, "x", 0.3, "")]
    (comparison,) = group_runs(map(read_run, folders))
    uniform, *others = comparison.methods
    assert [m.config["train.lr"] for m in others] == [0.2, 0.1, 0.3]
    baselines = [comparison.baseline(method, "uniform") for method in others]
    assert baselines == [uniform, uniform, None]
