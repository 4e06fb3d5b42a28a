"""Progress of runs: live bars on a terminal, plain lines in logs, or nothing; and stopping on signals."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from hansa.core.terminal import Terminal
from hansa.runs.columns import LOSSES, NO_FACTS, MetricFacts, base_metric, column_of, main_metric
from hansa.study.report.formats import format_number, format_value

if TYPE_CHECKING:
    from hansa.runs.driver import Run

REFRESH_SECONDS = 0.1
SUMMED = ("up_bytes", "down_bytes", "peer_bytes", "lost")
MAX_LINES = 20
"""Maximum number of plain lines that are printed for a run."""


class LatestNumbers:
    """The latest numbers of a run: the last main metric and loss; the total of bits and dropped clients."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        self._loss: float | None = None
        self._totals: Counter[str] = Counter()

    def add(self, record: Mapping[str, Any], facts: MetricFacts = NO_FACTS) -> str:
        """Add the record of a round, and return all numbers as text.

        >>> LatestNumbers().add({"round": 1, "test_accuracy": 0.5, "test_loss": 0.25, "up_bytes": 1000})
        'accuracy 50.0%  loss 0.25  sent 8 kbit'
        """
        latest = self._latest
        latest |= record
        self._loss = next((record[name] for name in LOSSES if name in record), self._loss)
        self._totals.update({name: int(record.get(name) or 0) for name in SUMMED})
        metric = main_metric(latest, facts)
        texts = []
        if metric in latest and metric not in LOSSES:
            texts.append(f"{column_of(metric).label} {format_value(metric, latest[metric])}")
        own = f"test_{base_metric(metric)}"
        values = {site: latest.get(f"{site}/{own}") for site in latest.get("sites") or ()}
        sites = {site: value for site, value in values.items() if value is not None}
        if sites and (worst := latest.get(f"sites_{own}_worst")) is not None:
            site = min(sites, key=lambda name: abs(sites[name] - worst))
            texts.append(f"worst site {site} {format_value(own, sites[site])}")
        texts.append(f"loss {format_number(self._loss)}")
        if dropped := self._totals["lost"]:
            texts.append(f"dropped {dropped}")
        texts.append(f"sent {format_number(self._totals['up_bytes'] + self._totals['down_bytes'], 'bytes')}")
        peers = self._totals["peer_bytes"]
        return "  ".join(texts) + (f" + {format_number(peers, 'bytes')} to peers" if peers else "")


class RunProgress:
    """The progress of one run: a callback of the run, or, for a run of another process, the receiver of `update`."""

    def __init__(self, display: ProgressDisplay, bar: TaskID | None = None) -> None:
        self._display, self._bar, self._numbers, self._begun = display, bar, LatestNumbers(), False

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool | None:
        if not self._begun:
            self._begun = True
            if note := run.weights_note:
                self._display.print_once(note, topic="weights")
        self.update(int(record["round"]), self._numbers.add(record, run.history.facts))
        return None

    def update(self, round: int, numbers: str) -> None:
        """Show that a run has reached a round, and its numbers."""
        assert self._bar is not None
        self._display.show(self._bar, round, numbers)

    def close(self) -> None:
        """End the display of a run that is not continued here."""
        assert self._bar is not None
        self._display.bars.update(self._bar, visible=False)


class _TimeLeftColumn(TimeRemainingColumn):
    """The time left, with the wording of log lines."""

    def render(self, task: Task) -> Text:
        return super().render(task).append(" left")


class ProgressDisplay:
    """Shows the progress of runs: a bar for each on a live console, lines on others, nothing without one.

    In a study, the bar of a finished run becomes a line above the others.

    Args:
        console: The console to print to.
        live: Whether the console can redraw its output.
    """

    def __init__(self, console: Console | None = None, live: bool = False) -> None:
        self.console, self.live = console, live
        width = 80 if console is None else console.width
        title = Column(no_wrap=True, overflow="ellipsis", max_width=max(16, 2 * width // 5))
        numbers = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self.bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=title),
            BarColumn(bar_width=24 if width >= 100 else 10),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", style="cyan", markup=False, table_column=numbers),
            _TimeLeftColumn(compact=True, table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            disable=not live,
            auto_refresh=False,  # refreshed by rounds: a thread would be unsafe in processes that fork
            speed_estimate_period=math.inf,
        )
        self._all_runs: TaskID | None = None
        self._finished, self._shown, self._printed = 0, -math.inf, set[str]()

    def __enter__(self) -> ProgressDisplay:
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.bars.stop()

    def expect(self, rounds: int) -> None:
        """Add rounds to the total of a study, whose remaining time is shown."""
        if self._all_runs is None:
            self._all_runs = self.bars.add_task("all runs", total=0, numbers="0 runs finished")
        self.bars.update(self._all_runs, total=(self._task(self._all_runs).total or 0) + rounds)

    def skip(self, rounds: int) -> None:
        """Remove rounds from the total of a study."""
        if self._all_runs is not None:
            self.expect(-rounds)

    def follow(self, title: str, rounds: int, completed: int = 0) -> RunProgress:
        """Return a callback that shows the progress of one run."""
        self.skip(completed)
        return RunProgress(self, self.bars.add_task(title, total=rounds, completed=completed, numbers=""))

    def show(self, bar: TaskID, round: int, numbers: str) -> None:
        """Show that the run of a bar has reached a round."""
        if self.console is None:
            return
        task = self._task(bar)
        previous, rounds = int(task.completed), int(task.total or 0)
        interval, last = max(1, rounds // MAX_LINES), round == rounds
        self.bars.update(bar, completed=round, numbers=numbers)
        if self._all_runs is not None:
            self._finished += last
            self.bars.update(self._all_runs, advance=round - previous, numbers=f"{self._finished} runs finished")
        if self.live:
            if last and self._all_runs is not None:
                self.bars.update(bar, visible=False)
                line = f"{task.description}: {round} rounds  {numbers}"
                self.console.print(line, style="dim", no_wrap=True, overflow="ellipsis", markup=False)
            if last or time.monotonic() - self._shown > REFRESH_SECONDS:
                self._shown = time.monotonic()
                self.bars.refresh()
        elif last or round // interval != previous // interval:
            parts = [f"{task.description}: round {round}/{rounds}", numbers, *_time_left(task)]
            if self._all_runs is not None and (study := self._task(self._all_runs)).total != rounds:
                parts += [f"all runs: {time_left}" for time_left in _time_left(study)]
            self.console.print("  ".join(parts), soft_wrap=True, markup=False)

    def print_once(self, text: str, topic: str = "") -> None:
        """Print a line above the progress, once for all runs with the same text or topic."""
        if text and (topic or text) not in self._printed:
            self._printed.add(topic or text)
            if self.console is not None:
                self.console.print(text, style="dim", soft_wrap=True, markup=False)

    def _task(self, bar: TaskID) -> Task:
        return next(task for task in self.bars.tasks if task.id == bar)


def _time_left(task: Task) -> list[str]:
    """Return the time left, estimated from the mean time of a round; nothing before the second round."""
    seconds = task.time_remaining
    return [] if seconds is None else [f"{format_number(seconds, 'seconds')} left"]


def progress_display(console: Console | None = None, quiet: bool = False) -> ProgressDisplay:
    """Return the display of a console (by default standard error): bars on a terminal or in a notebook, else lines."""
    if quiet:
        return ProgressDisplay()
    console = Terminal(stderr=True, highlight=False) if console is None else console
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None  # rich needs ipywidgets for bars
    return ProgressDisplay(console, live=console.is_terminal or notebook)


HANGUP = getattr(signal, "SIGHUP", None)
SIGNALS = tuple(name for name in (signal.SIGINT, signal.SIGTERM, HANGUP) if name is not None)


class InterruptHandler:
    """Stops a run after the current round on Ctrl-C, SIGTERM or a hangup; a second signal stops at once.

    A hangup that the caller ignores, as under ``nohup``, is ignored here too. Use it as a context manager and as a
    callback of the run.
    """

    def __init__(self, console: Console | None, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._console, self._signals = console, signals
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            for name in self._signals:
                if name != HANGUP or signal.getsignal(name) != signal.SIG_IGN:
                    self._previous[name] = signal.signal(name, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool:
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        with suppress(OSError):  # the terminal may be gone
            (Terminal(stderr=True) if self._console is None else self._console).print(
                "[yellow]stopping after this round, then saving (interrupt again to stop at once)[/]"
            )
