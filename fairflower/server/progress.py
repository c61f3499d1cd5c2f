"""What is told of every round: on the screen, to a tracker, and to the user's function."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fairflower.config import RunConfig
from fairflower.config.methods import TrackerSpec
from fairflower.errors import StopRun, logger
from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.numerics.metrics import over_domains
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.server.folder import RunFolder
from fairflower.server.history import ALL, HELD_OUT_PREFIX, Metrics
from fairflower.trackers import Tracker

RECENT = 6  # number of rounds in the live table
_DASH = "\N{EN DASH}"

#: Called with a round's number and metrics; returning True stops the run after the round.
OnRound = Callable[[int, Metrics], object]


class RunProgress:
    """Shows the progress of a run: rounds, time left, score per domain, AVG, worst and STD.

    In a terminal this is a live table, in a notebook the line of the last tested round, and
    otherwise a line for each. The title contains the method's name, for example ``"fedheal (2 of
    6)"``.
    """

    def __init__(self, console: Console, title: str, num_rounds: int) -> None:
        self.console = console
        self.title = title
        self.num_rounds = num_rounds
        self._score = ACCURACY
        self._rows: list[tuple[int, dict[str, float], dict[str, str]]] = []
        self._begin, self._first = time.monotonic(), 0
        self._bar = counting_bar(console, "rounds")
        self._task = self._bar.add_task(title, total=num_rounds)
        self._live: Live | None = None

    def start(self, folder: Path, completed: int = 0, score: Score = ACCURACY) -> None:
        """Print the title and the run folder, and start the live table of the primary score.

        ``completed`` is the number of rounds that earlier sessions have completed.
        """
        self._first, self._score = completed, score
        where = f"[bold]{escape(self.title)}[/] → {escape(str(folder))}"
        self.console.print(where, soft_wrap=True, highlight=False)
        if self.console.is_terminal and not self.console.is_jupyter:  # rich needs ipywidgets there
            self._live = Live(
                self._view(), console=self.console, refresh_per_second=4, transient=True
            )
            self._live.start()

    def round(
        self,
        server_round: int,
        scores: Mapping[str, float],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Show the results of a round.

        ``scores`` maps domains to primary scores, NaN for a domain without a test; it is empty if
        the round was not tested. From ``metrics``, only the score on a held-out domain, the
        differences between groups of people, the best round and ``epsilon`` are shown.
        """
        if scores:
            self._rows.append((server_round, dict(scores), _beside(metrics or {}, self._score)))
        self._bar.update(self._task, completed=server_round)
        if self._live is not None:
            self._live.update(self._view())
        elif scores:
            done = server_round - self._first
            each = (time.monotonic() - self._begin) / max(done, 1)
            left = each * (self.num_rounds - server_round)
            self._print_last(f"  {left:.0f} s left" if done and left else "")

    def stop(self) -> None:
        """Remove the live table, and print the line of the last tested round."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._rows:
                self._print_last()
        elif self.console.is_jupyter and self._rows and not self.console.quiet:
            print()

    def _print_last(self, eta: str = "") -> None:
        server_round, scores, beside = self._rows[-1]
        line = round_line(server_round, self.num_rounds, scores, beside, self._score) + eta
        if not self.console.is_jupyter:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        elif not self.console.quiet:  # a shorter line would leave the end of the one before
            print(f"\r{line}", end=20 * " ", flush=True)

    def _view(self) -> RenderableType:
        title = None if self._score == ACCURACY else escape(self._score.stated)
        table = Table(title=title, box=None, pad_edge=False, header_style="dim")
        table.add_column("round", justify="right")
        recent = self._rows[-RECENT:]
        domains = list(recent[-1][1]) if recent else []
        names = list(dict.fromkeys(name for *_, beside in recent for name in beside))
        summaries = over_domains(self._score)[:3]  # AVG, worst and STD, as for callbacks
        for name in [*domains, *(row.heading for row in summaries), *names]:
            table.add_column(escape(name), justify="right", overflow="fold")
        for server_round, scores, beside in recent:
            over = (row(_tested(scores)) for row in summaries)
            values = [_text(self._score, v) for v in (*scores.values(), *over)]
            values += [beside.get(name, _DASH) for name in names]
            table.add_row(str(server_round), *values)
        return Group(self._bar, table) if self._rows else Group(self._bar)


def counting_bar(console: Console, unit: str, *, transient: bool = False) -> Progress:
    """Return a progress bar that counts ``unit`` and shows the time left.

    In a notebook the bar is disabled, because rich would need ipywidgets to update it.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        transient=transient,
        disable=console.is_jupyter,
    )


def round_line(
    server_round: int,
    num_rounds: int,
    scores: Mapping[str, float],
    beside: Mapping[str, str] | None = None,
    score: Score = ACCURACY,
) -> str:
    """Return the line for a tested round; ``beside`` is added at the end.

    ``scores`` are the domains' primary scores, in base units, and NaN for an untested domain.

    >>> round_line(3, 10, {"mnist": 0.9, "svhn": 0.5})
    'round   3/10  mnist  90.0  svhn  50.0  |  AVG  70.0  MIN  50.0  STD ddof 1  28.3'
    >>> round_line(4, 10, {"a": 0.9, "b": math.nan})
    'round   4/10  a  90.0  b     –  |  1 of 2 domains: AVG  90.0  MIN  90.0  STD ddof 1     –'
    >>> round_line(4, 10, {"mnist": 0.9}, {"held out: svhn": "30.0"})
    'round   4/10  mnist  90.0  |  AVG  90.0  MIN  90.0  STD ddof 1     –  |  held out: svhn 30.0'
    >>> round_line(5, 10, {"a": 4.75, "b": 6.25}, score=Score("rmse", -1, "days", title="RMSE"))
    'round   5/10  RMSE  a  4.75  b  6.25  |  AVG   5.5  MAX  6.25  STD ddof 1 1.061'
    """
    tested = _tested(scores)
    domains = "  ".join(f"{name} {_text(score, value):>5}" for name, value in scores.items())
    of = f"{len(tested)} of {len(scores)} domains: " if len(tested) < len(scores) else ""
    rows = over_domains(score)[:3]
    over = "  ".join(f"{row.heading} {_text(score, row(tested)):>5}" for row in rows)
    more = "".join(f"  |  {name} {text}" for name, text in (beside or {}).items())
    named = "" if score == ACCURACY else f"{score.title}  "
    return f"round {server_round:>3}/{num_rounds}  {named}{domains}  |  {of}{over}{more}"


def _beside(metrics: Mapping[str, float], score: Score) -> dict[str, str]:
    """Return the held-out domain's score, differences between groups, the best round, epsilon."""
    start = f"{HELD_OUT_PREFIX}{score.name}/"
    held_out = [name for name in metrics if name.startswith(start)]
    beside = {f"held out: {n.removeprefix(start)}": _text(score, metrics[n]) for n in held_out}
    named = {f"{ALL}_{metric.name}": metric for metric in DIFFERENCES}
    beside |= {m.title: _text(m, metrics[name]) for name, m in named.items() if name in metrics}
    beside |= {"best": f"round {metrics['best_round']:.0f}"} if "best_round" in metrics else {}
    return beside | ({"epsilon": f"{metrics['epsilon']:.3g}"} if "epsilon" in metrics else {})


def _tested(scores: Mapping[str, float]) -> list[float]:
    return [value for value in scores.values() if not math.isnan(value)]


def _text(score: Score, value: float) -> str:
    return _DASH if math.isnan(value) else score.text(value)


class CallbackList:
    """Calls ``on_round`` and the tracker set by ``track`` after each round.

    If the tracker fails, it is disabled with a warning, and ``untracked`` in ``run.json`` says in
    which round and why. An exception in ``on_round`` ends the run.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, on_round: OnRound | None) -> None:
        self._folder, self._config, self._on_round = folder, config, on_round
        self._spec = TrackerSpec.read(config.track)
        self._tracker: Tracker | None = None
        self._round = 0

    def begin(self, after: int) -> None:
        """Start tracking; ``after`` is the last completed round, or -1 for a new run."""
        track, self._round = self._config.track, after + 1
        if track == "none":
            return
        keys, path = self._folder.fact("tracked") or {}, self._folder.path
        try:
            key = keys.get(track, "")
            self._tracker = self._spec.make(path, self._config.concise(), key, after)
            self._tracker.score = self._folder.metrics.primary
            keys = {**keys, track: str(self._tracker.key)}
        except Exception as error:
            self._disable(error)
        else:
            self._folder.note("tracked", keys)

    def round(self, server_round: int, metrics: Metrics) -> bool:
        """Call the tracker and ``on_round`` after a round; return True if the run should stop."""
        self._round = server_round
        self._track(lambda tracker: tracker.round(server_round, metrics))
        if self._on_round is None or server_round == 0:
            return False
        try:
            answer = self._on_round(server_round, dict(metrics))
        except StopRun:
            return True
        return isinstance(answer, bool | np.bool_) and bool(answer)

    def end(self) -> None:
        """Pass the final metrics and the status of the run to the tracker."""
        status, final = str(self._folder.fact("status")), self._folder.metrics.final()
        self._track(lambda tracker: tracker.end(status, final))

    def _track(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            try:
                with self._spec.naming_failures():
                    call(self._tracker)
            except Exception as error:
                self._disable(error)

    def _disable(self, error: Exception) -> None:
        """Go on without the tracker: libraries and the network may raise anything."""
        logger.warning("track = %s failed and is now disabled: %s", self._config.track, error)
        self._tracker = None
        earlier = self._folder.fact("untracked") or {}
        with suppress(OSError):  # a full disk ends the run elsewhere, with its own error
            self._folder.note("untracked", {**earlier, str(self._round): str(error)})
