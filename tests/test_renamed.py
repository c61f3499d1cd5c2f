"""Old public names work, with a warning that has the new name."""

from __future__ import annotations

from importlib import import_module

import pytest
import toys

RENAMED = [
    ("numerics.clustering", "choose", "resolve_variant"),
    ("numerics.clustering", "describe", "cluster_diagnostics"),
    ("models", "remember", "cache_first_stage"),
    ("models", "recall", "cached_first_stage"),
    ("models.weights", "from_text", "decode_json_weights"),
    ("models.weights", "from_file", "load_weights_file"),
    ("aggregation.carried_weights", "shares", "current_weights"),
    ("aggregation.carried_weights", "hold", "store_weights"),
    ("aggregation.directions", "angle", "inequality_angle"),
    ("aggregation.directions", "equalising", "inequality_gradient"),
    ("aggregation.directions", "recall", "with_absent_clients"),
    ("aggregation.directions", "remember", "store_updates"),
    ("aggregation.directions", "stretched", "rescale_to_length"),
    ("aggregation.consistency", "UpdateConsistency", "SignConsistency"),
    ("aggregation.clusters", "Clustered", "ClusteringMixin"),
    ("errors", "RuleError", "StrategyError"),
    ("errors", "RunError", "RunFolderError"),
    ("errors", "Stopped", "RunInterrupted"),
    ("exchanges", "Centres", "ClusterCenters"),
    ("exchanges", "DynamicRegulariser", "DynamicRegularizer"),
    ("data", "resolve", "with_absolute_dir"),
    ("data.own_folder", "ImageFolder", "DomainImageFolder"),
    ("data.own_folder", "NpzFolder", "DomainNpzFolder"),
    ("testing.federations", "Tiny", "TinyModel"),
    ("testing.federations", "tiny", "tiny_model"),
    ("testing.federations", "federate", "run_toy_rounds"),
    ("testing.federations", "same", "models_equal"),
    ("testing.rounds", "still", "zero_update"),
    ("testing.strategies", "check_agreement", "check_unanimity"),
    ("testing.trainers", "Method", "TrainerCase"),
    ("testing.trainers", "check_shared_model", "check_reused_model"),
    ("testing.trainers", "check_explosion", "check_diverging_loss"),
    ("testing.trainers", "check_alone", "check_without_exchanges"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_is_the_new_one_with_a_warning(module: str, old: str, new: str) -> None:
    room = import_module(f"fairflower.{module}")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is now called {new}\."):
        assert getattr(room, old) is getattr(room, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("train_images", "train_examples"),
        ("test_images", "test_examples"),
        ("descend", "run_epochs"),
    ],
)
def test_an_old_attribute_of_a_trainer_is_the_new_one_with_a_warning(old: str, new: str) -> None:
    trainer = toys.trainer("sgd")
    with pytest.warns(DeprecationWarning, match=rf"^\w+\.{old} is now called {new}\.$"):
        assert getattr(trainer, old) == getattr(trainer, new)


def test_other_names_are_unknown_as_in_any_module() -> None:
    clustering = import_module("fairflower.numerics.clustering")
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        clustering.unknown  # noqa: B018
