"""The progress of runs: live bars on a terminal, plain lines in logs, or nothing; and stopping on signals."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from hansa.core.terminal import Terminal
from hansa.runs.columns import ACCURACY, LOSSES, base_metric, column_of, main_metric
from hansa.runs.weighting import unweighted_note
from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.runs.driver import Run

REFRESH_SECONDS = 0.1
MAX_LINES = 20
"""How many plain lines are printed for a run at most."""


class LatestMetrics:
    """The newest numbers of a run: the main metric and the loss as last measured; bits and dropped clients so far."""

    def __init__(self) -> None:
        self.metric, self.value = ACCURACY, math.nan
        self.loss: float | None = None
        self.sites: dict[str, float] = {}  # the main metric by site of a federation
        self.site_metric, self.worst = ACCURACY, math.nan
        self.bits = self.peer_bits = 0
        self.dropped = 0

    def update(self, record: Mapping[str, Any], metric: str = ACCURACY) -> None:
        """Add the record of a round, in which ``metric`` is the main one."""
        if metric in record and (metric not in LOSSES or self.metric in LOSSES or self.value != self.value):
            self.metric, self.value = metric, float(record[metric])
        losses = ("test_loss", "sites_test_loss", "loss", "train_loss")
        self.loss = next((record[name] for name in losses if name in record), self.loss)
        base = base_metric(metric)
        if f"sites_test_{base}_worst" in record:
            self.site_metric, self.worst = f"test_{base}", float(record[f"sites_test_{base}_worst"])
            by_site = {site: record.get(f"{site}/test_{base}") for site in record.get("sites") or {}}
            self.sites = {site: float(value) for site, value in by_site.items() if value is not None}
        self.bits += 8 * (int(record.get("up_bytes") or 0) + int(record.get("down_bytes") or 0))
        self.peer_bits += 8 * int(record.get("peer_bytes") or 0)
        self.dropped += int(record.get("lost") or 0)

    def texts(self) -> list[str]:
        """Return the numbers as text."""
        shown = self.metric not in LOSSES and self.value == self.value
        main = [f"{column_of(self.metric).label} {formats.formatter_of(self.metric)(self.value)}"] if shown else []
        if self.sites:
            worst = min(self.sites, key=lambda site: abs(self.sites[site] - self.worst))
            main.append(f"worst site {worst} {formats.formatter_of(self.site_metric)(self.sites[worst])}")
        peers = f" + {formats.format_bits(self.peer_bits)} to peers" if self.peer_bits else ""
        sent = f"sent {formats.format_bits(self.bits)}{peers}"
        dropped = [f"dropped {self.dropped}"] * bool(self.dropped)
        return [*main, f"loss {formats.format_number(self.loss)}", *dropped, sent]


class RunProgress:
    """The progress of one run. It is a callback of the run; `update` shows a run of another process."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display, self._metrics, self._begun = display, LatestMetrics(), False

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool | None:
        self._metrics.update(record, main_metric(record, run.history.facts))
        if not self._begun:
            self._begun = True
            note = unweighted_note(run.algorithm, run.task.population)
            self._display.print_once(note, topic="weights" if note else "")
        self.update(int(record["round"]), self._metrics)
        return None

    def update(self, round: int, metrics: LatestMetrics) -> None:
        """Show that a run has reached a round."""

    def close(self) -> None:
        """End the display of a run that is not continued here."""


class ProgressDisplay:
    """Shows the progress of runs. This one shows nothing; `ProgressBars` and `ProgressLines` do."""

    console: Console | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
    """The signals that stop a run started in Python after its current round."""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def follow(self, title: str, rounds: int, done: int = 0) -> RunProgress:
        """Return a callback that shows the progress of one run."""
        return RunProgress(self)

    def expect(self, rounds: int) -> None:
        """Announce the rounds of all runs of a study, so that the time left for all of them is shown."""

    def skip(self, rounds: int) -> None:
        """Announce that some of these rounds need not be run."""

    def print_once(self, text: str, topic: str = "") -> None:
        """Print a line above the progress, once however many runs have the same to say, or something on a topic."""
        printed: set[str] = self.__dict__.setdefault("_printed", set())
        if text and (topic or text) not in printed:
            printed.add(topic or text)
            if self.console is not None:
                self.console.print(text, style="dim", soft_wrap=True, markup=False)


class StudyClock:
    """The time left for all runs of a study, by the mean time of its rounds so far.

    >>> clock = StudyClock()
    >>> clock.expect(10)
    >>> clock.skip(4)
    >>> clock.add(2)
    >>> clock.seconds_left(now=clock.began + 6.0)
    12.0
    """

    def __init__(self) -> None:
        self.began, self.total, self.done = time.monotonic(), 0, 0
        self._lock = threading.Lock()  # runs side by side are shown by several threads

    def expect(self, rounds: int) -> None:
        """Add rounds that are to be run."""
        with self._lock:
            self.total += rounds

    def skip(self, rounds: int) -> None:
        """Remove rounds that are not."""
        self.expect(-rounds)

    def add(self, rounds: int = 1) -> None:
        """Count rounds that were run."""
        with self._lock:
            self.done += rounds

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return the expected seconds until all rounds are done; None before the first."""
        now = time.monotonic() if now is None else now
        return (now - self.began) / self.done * max(0, self.total - self.done) if self.done else None


class ProgressBars(ProgressDisplay):
    """Live bars, one for each run. In a study the bar of a finished run becomes a line above the others."""

    def __init__(self, console: Console) -> None:
        self.console: Console = console
        title = Column(no_wrap=True, overflow="ellipsis", max_width=max(16, 2 * console.width // 5))
        self.bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=title),
            BarColumn(bar_width=24 if console.width >= 100 else 10),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", style="cyan", markup=False, table_column=_NUMBERS),
            _TimeLeftColumn(compact=True, table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            auto_refresh=False,  # a round refreshes it: no thread stands in the way of processes that are forked
        )
        self.all_runs: TaskID | None = None
        self._total = self.finished_runs = 0
        self._shown = -math.inf

    def expect(self, rounds: int) -> None:
        if self.all_runs is None:
            self.all_runs = self.bars.add_task("all runs", total=0, numbers="0 runs finished")
        self._total += rounds
        self.bars.update(self.all_runs, total=self._total)

    def skip(self, rounds: int) -> None:
        if self.all_runs is not None:
            self.expect(-rounds)

    def __enter__(self) -> ProgressDisplay:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def refresh(self, at_once: bool = False) -> None:
        """Draw the bars again, at most every `REFRESH_SECONDS`."""
        if at_once or time.monotonic() - self._shown > REFRESH_SECONDS:
            self._shown = time.monotonic()
            self.bars.refresh()

    def follow(self, title: str, rounds: int, done: int = 0) -> RunProgress:
        self.skip(done)
        return _RunBar(self, title, rounds, done)


class _RunBar(RunProgress):
    def __init__(self, display: ProgressBars, title: str, rounds: int, done: int) -> None:
        super().__init__(display)
        self._bars, self._title, self._rounds, self._done = display, title, rounds, done
        self._bar = display.bars.add_task(title, total=rounds, completed=done, numbers="")

    def update(self, round: int, metrics: LatestMetrics) -> None:
        display, all_runs = self._bars, self._bars.all_runs
        display.bars.update(self._bar, completed=round, numbers="  ".join(metrics.texts()))
        if all_runs is not None:
            display.bars.advance(all_runs, round - self._done)
            self._done = round
            if round == self._rounds:
                display.finished_runs += 1
                display.bars.update(all_runs, numbers=f"{display.finished_runs} runs finished")
                display.bars.update(self._bar, visible=False)
                line = "  ".join([f"{self._title}: {round} rounds", *metrics.texts()])
                display.console.print(line, style="dim", no_wrap=True, overflow="ellipsis", markup=False)
        display.refresh(round == self._rounds)

    def close(self) -> None:
        self._bars.bars.update(self._bar, visible=False)


class ProgressLines(ProgressDisplay):
    """Plain lines for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console: Console = console
        self.clock = StudyClock()

    def expect(self, rounds: int) -> None:
        self.clock.expect(rounds)

    def skip(self, rounds: int) -> None:
        self.clock.skip(rounds)

    def follow(self, title: str, rounds: int, done: int = 0) -> RunProgress:
        self.clock.skip(done)
        return _RunLines(self, title, rounds, done)


class _RunLines(RunProgress):
    def __init__(self, display: ProgressLines, title: str, rounds: int, done: int) -> None:
        super().__init__(display)
        self._lines, self._title, self._rounds = display, title, rounds
        self._began, self._first = time.monotonic(), done
        self._done, self._printed, self._every = done, done, max(1, rounds // MAX_LINES)

    def update(self, round: int, metrics: LatestMetrics) -> None:
        clock, rounds = self._lines.clock, self._rounds
        clock.add(round - self._done)
        self._done = round
        if round // self._every == self._printed // self._every and round != rounds:
            return
        self._printed = round
        left = (time.monotonic() - self._began) / (round - self._first) * (rounds - round)
        parts = [f"{self._title}: round {round}/{rounds}", *metrics.texts(), f"{formats.format_duration(left)} left"]
        if clock.total > rounds:
            parts.append(f"all runs: {formats.format_duration(clock.seconds_left())} left")
        self._lines.console.print("  ".join(parts), soft_wrap=True, markup=False)


class _TimeLeftColumn(TimeRemainingColumn):
    """The time left, as in the lines of logs."""

    def render(self, task: Task) -> Text:
        return super().render(task).append(" left")


_NUMBERS = Column(no_wrap=True, overflow="ellipsis", ratio=1)


def progress_display(console: Console | None = None, quiet: bool = False) -> ProgressDisplay:
    """Return the display that suits a console (standard error by default): bars on a terminal or in a notebook."""
    if quiet:
        return ProgressDisplay()
    console = Terminal(stderr=True, highlight=False) if console is None else console
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None  # rich needs ipywidgets for bars
    return ProgressBars(console) if console.is_terminal or notebook else ProgressLines(console)


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
                if name == HANGUP and signal.getsignal(name) == signal.SIG_IGN:
                    continue
                self._previous[name] = signal.signal(name, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a stopped command: 128 plus the signal number, as in shells."""
        return 0 if self.received is None else 128 + self.received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        with suppress(OSError):  # the terminal may be gone
            (Terminal(stderr=True) if self._console is None else self._console).print(
                "[yellow]stopping after this round, then saving (interrupt again to stop at once)[/]"
            )
