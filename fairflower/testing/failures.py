"""What all checks share: errors that name the checked part, misspelt hooks, ranges and arrays."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.arguments import Configurable
from fairflower.errors import NotInstalled, UserError, failure_text

Arrays = Mapping[str, NDArray[Any]]


@contextmanager
def as_assertions(part: Any) -> Iterator[None]:
    """Turn exceptions into an ``AssertionError`` with the part's name and the place in its code."""
    name, module = getattr(part, "__name__", str(part)), part.__module__
    try:
        yield
    except NotInstalled:
        raise
    except (AssertionError, UserError) as error:
        raise AssertionError(f"{name}: {error}") from error
    except Exception as error:
        raise AssertionError(
            f"{name} failed with {failure_text(error, module)}. Correct its code."
        ) from error


def check_hooks(kind: type, base: type) -> None:
    """Check that no method of a class is a misspelt hook of its base class.

    >>> from fairflower.strategies import FedAvg
    >>> class Mine(FedAvg):
    ...     def wiegh(self, cohort):
    ...         return cohort.sample_weights
    >>> check_hooks(Mine, FedAvg)
    Traceback (most recent call last):
        ...
    AssertionError: Mine.wiegh: nothing calls this method. Did you mean weigh?
    """
    hooks = [name for name in dir(base) if not name.startswith("_")]
    for name in vars(kind):
        near = difflib.get_close_matches(name, hooks, n=1, cutoff=0.75)
        if name.startswith("_") or name in hooks or not callable(getattr(kind, name)):
            continue
        if near and near[0] not in vars(kind):
            raise AssertionError(
                f"{kind.__name__}.{name}: nothing calls this method. Did you mean {near[0]}?"
            )


def check_ranges(kind: type[Configurable]) -> None:
    """Check that all arguments declare which values are allowed."""
    for name, argument in kind.argument_specs().items():
        assert argument.bounded or argument.text, (
            f"{name} has no declared range. Declare it as Annotated[float, Range(0, 1)] or "
            "Literal['a', 'b']."
        )


def check_arrays(model: Arrays, like: Arrays, problem: str = "") -> None:
    """Check that a model has the arrays of another, with their shapes and types, and is finite."""
    assert list(model) == list(like), f"{problem}arrays were added, lost or reordered."
    for key, array in model.items():
        after, before = ((a.dtype, a.shape) for a in (array, like[key]))
        assert after == before, f"{problem}{key} was {before}, but became {after}."
        assert np.isfinite(array).all(), f"{problem}{key} is no longer finite."
