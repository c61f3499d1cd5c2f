"""Any failure of a check as an assertion that names the checked part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fairflower.errors import UserError, failure_text


@contextmanager
def as_assertions(name: str, module: str) -> Iterator[None]:
    """Turn exceptions into an ``AssertionError`` with the part's name and, in ``module``, place."""
    try:
        yield
    except AssertionError:
        raise
    except UserError as error:
        raise AssertionError(f"{name}: {error}") from error
    except Exception as error:
        raise AssertionError(
            f"{name} failed with {failure_text(error, module)}. Correct its code."
        ) from error
