"""Old public names work, with a warning that has the new name."""

from __future__ import annotations

from importlib import import_module

import pytest

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
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_is_the_new_one_with_a_warning(module: str, old: str, new: str) -> None:
    room = import_module(f"fairflower.{module}")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is now called {new}\."):
        assert getattr(room, old) is getattr(room, new)


def test_other_names_are_unknown_as_in_any_module() -> None:
    clustering = import_module("fairflower.numerics.clustering")
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        clustering.unknown  # noqa: B018
