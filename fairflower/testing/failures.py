"""What all checks share: failures that name the checked part, and misspelt hooks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

from fairflower.errors import NotInstalled, UserError, failure_text


@contextmanager
def as_assertions(name: str, module: str) -> Iterator[None]:
    """Turn exceptions into an ``AssertionError`` with the part's name and, in ``module``, place."""
    try:
        yield
    except (AssertionError, NotInstalled):
        raise
    except UserError as error:
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
