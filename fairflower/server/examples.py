"""Test examples and predictions of a final model, for reports, and their file of up to 1.4 MB."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from fairflower.arguments import Count, conform
from fairflower.data import Federation
from fairflower.errors import RunFolderError, failure_text, logger
from fairflower.files import Arrays, DamagedFile, read_arrays, write_arrays

if TYPE_CHECKING:  # slow to import, and reports read examples
    from fairflower.server.folder import RunFolder
    from fairflower.server.setup import RunSetup

EXAMPLES = "examples.safetensors"  # file in a run folder

#: Most pixels of an image's side, points of a domain, numbers of a point, and domains.
SIDE, POINTS, NUMBERS, DOMAINS = 256, 300, 4, 16

#: Which images are stored: a name, and the share of the domain's examples that are worse.
PLACES = {"worst": 0.0, "lower quartile": 0.25, "median": 0.5, "best": 1.0}


class Facts(TypedDict):
    """Description of the arrays: after which round, from which domains, and captions.

    ``true`` and ``predicted`` are masks of N examples, [N, H, W], with an ``image``, uint8
    [N, C, H, W]; or numbers, [N, D], with the place of their ``domain`` in ``domains`` and whether
    they are drawn ``open``, [N].
    """

    round: Count
    domains: list[str]
    notes: list[str]  # of each image, or of all points


def store_examples(setup: RunSetup, folder: RunFolder, model: Arrays, last: int) -> None:
    """Store examples of the tests of a run's model after its ``last`` round, if it keeps any."""
    task, evaluate = setup.federation.learns, setup.config.evaluate
    (folder.path / EXAMPLES).unlink(missing_ok=True)  # of an earlier last model
    there = evaluate.keep_examples and evaluate.test and evaluate.by != "clients"
    if not (task.draws and there) or setup.config.privacy.on:
        return
    predict = partial(setup.evaluator.predictions, model)
    try:
        found = examples_of(setup.federation, predict, folder.metrics.last_test()[1], last)
        write_arrays(folder.path / EXAMPLES, *found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("%s: no examples for reports: %s", task, failure_text(error))


def examples_of(
    federation: Federation, predict: Callable[[str], Any], scores: Mapping[str, float], last: int
) -> tuple[Arrays, Facts]:
    """Return what a report draws of the tests of a model, that of the ``last`` round.

    ``predict`` returns a domain's targets and predictions; ``scores`` are primary scores by domain.
    """
    task, primary = federation.learns, federation.learns.primary
    known = {d: v for d, v in scores.items() if math.isfinite(v)} or dict.fromkeys(scores, 0.0)
    worst = sorted(known, key=lambda domain: primary.better * known[domain])[:DOMAINS]
    if task.draws == "masks":
        y, predictions = predict(worst[0])
        values = np.array([task.of_example(*pair) for pair in zip(y, predictions, strict=True)])
        order = np.argsort(values, kind="stable")[: np.isfinite(values).sum()]  # NaN is last
        names = {int(order[round(p * (len(order) - 1))]): name for name, p in PLACES.items()}
        images, rows = federation.test(worst[0]).x, [*names]
        step = -(-max(images.shape[2:]) // SIDE)  # of larger images, only every step-th pixel
        drawn = {"image": images[rows], "true": y[rows], "predicted": predictions[rows]}
        arrays = {name: a[..., ::step, ::step].astype(np.uint8) for name, a in drawn.items()}
        notes = [f"{n}: {primary.text(values[k])} {primary.unit}" for k, n in names.items()]
        return arrays, Facts(round=last, domains=worst[:1], notes=notes)
    domains, parts = [d for d in federation.domains if d in worst], []
    for d, domain in enumerate(domains):
        true, predicted, circles = task.points(*predict(domain))
        rows = np.linspace(0, len(true) - 1, min(len(true), POINTS)).round().astype(int).tolist()
        pair = (values[rows, :NUMBERS].astype(np.float32) for values in (true, predicted))
        parts.append((*pair, circles[rows], np.full(len(rows), d)))
    columns = map(np.concatenate, zip(*parts, strict=True))
    arrays = dict(zip(("true", "predicted", "open", "domain"), columns, strict=True))
    return arrays, Facts(round=last, domains=domains, notes=[task.drawn])


def read_examples(path: Path, server_round: int) -> tuple[Arrays, Facts] | None:
    """Return the examples that a run has stored after a round, or None if there are none.

    Raises ``RunFolderError`` if the file is damaged.
    """
    if not (file := path / EXAMPLES).exists():
        return None
    try:
        arrays, facts = read_arrays(file)
        conform(facts, Facts)
        n, shape = len(facts["notes"]), arrays["true"].shape
        if "image" in arrays:
            fits = arrays["image"].shape in [(n, c, *shape[1:]) for c in (1, 3)]
        else:
            fits = len(shape) == 2 and {arrays[k].shape for k in ("open", "domain")} == {shape[:1]}
        if not fits or arrays["predicted"].shape != shape or 0 in shape:
            raise ValueError(f"true has the shape {shape}, and other arrays do not fit it")
    except (DamagedFile, ValueError, LookupError) as error:
        raise RunFolderError(f"{file}: {error}") from error
    return (arrays, Facts(**facts)) if facts["round"] == server_round else None  # type: ignore[typeddict-item]
