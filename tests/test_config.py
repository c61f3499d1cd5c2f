"""The run config: round trips, checks, and agreement with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import invalid_values
import pytest
import tables
from hypothesis import given
from hypothesis import strategies as st
from parametrize import mark_others_nightly

from fairflower.config import RunConfig, StrategyConfig
from fairflower.config.run import check_tuned, default_values, execution_keys, key_help, method_key
from fairflower.config.text import (
    argument_to_key,
    flatten_tables,
    key_to_argument,
    parse_assignments,
    read_toml,
)
from fairflower.errors import ConfigError
from fairflower.plans.plan import Plan
from fairflower.server.checkpoint import CHANGEABLE
from fairflower.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]


def test_pyproject_declares_every_key_with_its_default():
    text = (ROOT / "pyproject.toml").read_text()
    assert tables.with_settings(text) == text, "run python docs/tables.py"
    declared = flatten_tables(tomllib.loads(text)["tool"]["flwr"]["app"]["config"])
    assert declared == default_values()
    for key, default in default_values().items():
        assert type(declared[key]) is type(default), key


def test_the_package_of_strategies_has_all_of_the_registry() -> None:
    text = (ROOT / "fairflower" / "strategies" / "__init__.py").read_text()
    assert tables.with_strategies(text) == text, "run python docs/tables.py"
    fewer = text.replace("from fairflower.strategies.afl import AFL as AFL\n", "")
    assert fewer != text
    assert tables.with_strategies(fewer) == text


def test_execution_settings_do_not_change_the_method():
    (more_rounds,) = CHANGEABLE - execution_keys()
    assert more_rounds == "num-server-rounds"
    own = default_values()
    changed = own | {"round-timeout": 60.0, "client-gpus": 0.5, "workers": 2, "data.dir": "/x"}
    assert method_key(changed) == method_key(own)
    assert method_key(own | {"train.lr": 0.1}) != method_key(own)


def test_the_page_on_faults_names_the_settings_that_may_be_given_again():
    page = (ROOT / "docs" / "faults.md").read_text()
    sentence = page.partition("Only these may be given again:")[2].partition(". A changed")[0]
    assert sorted(re.findall(r"`([^`]+)`", sentence)) == sorted(CHANGEABLE)


@pytest.mark.parametrize("name", STRATEGIES)
def test_config_and_constructor_refuse_the_same_arguments(name):
    for arg, allowed in STRATEGIES[name].argument_specs().items():
        assert allowed.bounded or allowed.text, arg
        STRATEGIES[name](**{arg: allowed.default})
        key = f"strategy.{argument_to_key(arg)}"
        for bad in invalid_values.out_of_range(allowed):
            with pytest.raises(ConfigError) as by_hand:
                STRATEGIES[name](**{arg: bad})
            with pytest.raises(ConfigError) as by_key:
                RunConfig.from_flat({"strategy.name": name, key: bad})
            assert str(by_hand.value).startswith(f"{arg} = ")
            assert str(by_key.value).partition(":")[2] == str(by_hand.value).partition(":")[2]


def test_pyproject_declares_no_federations():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "federations" not in project["tool"]["flwr"]


def test_the_default_config_survives_conversion_to_flat_and_toml():
    assert RunConfig.from_flat(RunConfig().to_flat()) == RunConfig()
    assert RunConfig.from_flat(flatten_tables(tomllib.loads(RunConfig().to_toml()))) == RunConfig()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31),
            "train.lr": st.floats(0, 10),
            "data.dir": st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
            "data.augment": st.booleans(),
            "strategy.tau": st.one_of(st.floats(0, 1), st.just("none")),
            "strategy.variant": st.sampled_from(["paper", "released", "default"]),
        },
    )
)
def test_any_config_survives_conversion_to_flat_and_toml(flat):
    run_config = RunConfig.from_flat(flat)
    assert RunConfig.from_flat(run_config.to_flat()) == run_config
    assert RunConfig.from_flat(flatten_tables(tomllib.loads(run_config.to_toml()))) == run_config


def test_the_values_none_and_default_disable_or_omit_an_argument():
    config = RunConfig.from_flat({"strategy.tau": "none", "strategy.beta": "default"})
    assert config.strategy.args == {"tau": None}


def test_training_settings_and_arguments_may_be_tuned():
    """Every run of a comparison has the setting, also those of methods without the argument."""
    config = RunConfig.from_flat({"tuned": "train.lr,client.mu,strategy.tau"})
    check_tuned([config, RunConfig()])
    for wrong in ("client.nu", "client.name", "seed"):
        with pytest.raises(ConfigError, match=rf"tuned = .*{wrong}'"):
            check_tuned([config, RunConfig.from_flat({"tuned": f"train.lr,{wrong}"})])
        with pytest.raises(ConfigError, match=rf"tuned = .*{wrong}'"):  # also of a single run
            Plan([RunConfig.from_flat({"tuned": f"train.lr,{wrong}"})])


@given(st.permutations(["t", "scale", "space"]))
def test_the_label_does_not_depend_on_the_order_of_arguments(order):
    args = {"t": 0.3, "scale": None, "space": "gradient"}
    label = StrategyConfig("fedequilibria", {arg: args[arg] for arg in order}).label
    assert label == "fedequilibria:t=0.3:scale=none:space=gradient"


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"train.lr": float("nan")}, "nan: expected a number >= 0"),
        ({"data.augment": "False"}, "expected true or false"),
        ({"engine": "spark"}, "expected auto or ray or flower or inline"),
        (
            {"strategy.name": "fedheal", "strategy.tua": 0.3},
            "argument of fedheal 'tua'. Did you mean 'tau'[?] Valid: beta, tau, variant[.]$",
        ),
        (
            {"strategy.name": "fedavg", "strategy.foo": 0.3},
            "strategy.foo: fedavg has no arguments, that is, its constructor has no keyword-only "
            "parameters. Remove the argument[.]$",
        ),
        ({"data.fraction": 0.1, "data.examples-per-client": 5}, "Set one to 0"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(flat, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat(flat)


#: A key of each type of setting, with and without bounds or choices, and keys of methods.
KEYS = (
    *("seed", "client-cpus", "fraction-train", "train.lr", "data.augment", "data.dir", "engine"),
    *("run-name", "data.name", "model.name", "model.weights", "strategy.name", "client.name"),
    *("strategy.tau", "strategy.variant"),
)


@pytest.mark.parametrize(
    "key", mark_others_nightly([(key,) for key in key_help()], [(key,) for key in KEYS])
)
def test_damaged_values_cause_at_most_a_config_error(key):
    messages = []
    for value in invalid_values.PYTHON_VALUES.values():
        try:
            RunConfig.from_flat({key: value}).to_toml().encode()
        except ConfigError as error:
            messages.append(str(error))
    assert messages
    assert max(len(text.encode()) for text in messages) < 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed={'9' * 5000}", r"^seed = '999.*\.\.\..*999': expected a whole number >= 0"),
        (f"seed=0x{'f' * 5000}", "^seed = a whole number with 20000 bits: expected at most"),
        (f"train.lr=1{'0' * 400}", "^train.lr = 10000.*: expected a finite number"),
        (f"train.lr={'[' * 2000}{']' * 2000}", "^train.lr = .*: expected a number >= 0"),
        ('data.dir="a\\u0000b"', r"data.dir = 'a\\x00b': expected text that UTF-8 can encode"),
        ("data.dir=caf\udce9", r"data.dir = 'caf\\udce9': expected text that UTF-8 can encode"),
        ("seed=1\nnum-server-rounds=9", "seed = .*: expected a whole number >= 0"),
    ],
)
def test_damaged_text_causes_a_config_error(text, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat(parse_assignments([text]))


@pytest.mark.parametrize("name", ["2026-01-02", "07:30:00", "2026-01-02T07:30:00Z"])
def test_dates_are_parsed_as_text(name):
    assert parse_assignments([f"run-name={name}"]) == {"run-name": name}


@pytest.mark.parametrize(
    "text",
    [
        f"seed = {'9' * 5000}",
        f"seed = {'[' * 2000}{']' * 2000}",
        f"seed = {'{a = ' * 2000}1{'}' * 2000}",
        f"{'.'.join('a' * 2000)} = 1",
    ],
)
def test_config_files_that_python_cannot_parse_or_open_are_refused(text, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        read_toml(tmp_path / "bad.toml")
    for name in ("no\0file", "no\ud800file"):
        with pytest.raises(ConfigError, match=r"config file = .*: expected a path"):
            read_toml(tmp_path / name)


def test_integers_are_accepted_for_floats():
    assert RunConfig.from_flat({"train.lr": 1}).train.lr == 1.0


def test_missing_and_invalid_config_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no-such"):
        read_toml(tmp_path / "no-such.toml")
    (tmp_path / "bad.toml").write_text("seed = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.name": "cnn"}, r"model\.name = 'cnn': FedGC trains prompt-vit-tiny or"),
        ({"model.name": "vpt-vit-tiny"}, r"'vpt-vit-tiny': FedGC trains prompt-vit-tiny or"),
        ({"client.variant": "new"}, r"client\.variant = 'new': expected adapted or paper or"),
        ({"client.num-clusters": 2.5}, r"client\.num-clusters = 2\.5: expected a whole number"),
        ({"client.num-clusters": 0}, r"client\.num-clusters = 0: expected a whole number >= 1"),
        (
            {"client.num-clusters": "some"},
            r"client\.num-clusters = 'some': expected a whole number >= 1 or auto",
        ),
    ],
)
def test_settings_that_fedgc_does_not_support_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat({"client.name": "fedgc", "model.name": "prompt-vit-tiny"} | changes)


@pytest.mark.parametrize("name", ["lambda_", "class_", "max_", "clients_per_domain", "in_"])
def test_an_argument_is_restored_from_its_key(name: str) -> None:
    assert key_to_argument(argument_to_key(name)) == name
