"""The progress of runs: live bars on a terminal, plain lines in logs, or nothing; and stopping on signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.runs.driver import Run

RunCallback: TypeAlias = "Callable[[Run, dict[str, Any]], bool | None]"

MAX_LINES = 20
"""How many plain lines are printed for a run at most."""


class LatestMetrics:
    """The newest numbers of a run: the last measured accuracy and loss; bits and dropped clients so far."""

    def __init__(self) -> None:
        self.accuracy: float | None = None
        self.loss: float | None = None
        self.bits = self.peer_bits = 0
        self.dropped = 0

    def update(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round."""
        self.accuracy = record.get("test_accuracy", self.accuracy)
        self.loss = record.get("test_loss", record.get("loss", record.get("train_loss", self.loss)))
        self.bits += 8 * (int(record.get("up_bytes") or 0) + int(record.get("down_bytes") or 0))
        self.peer_bits += 8 * int(record.get("peer_bytes") or 0)
        self.dropped += int(record.get("lost") or 0)

    def texts(self) -> list[str]:
        """Return the numbers as text."""
        accuracy = [] if self.accuracy is None else [f"accuracy {formats.format_percent(self.accuracy)}"]
        peers = f" + {formats.format_bits(self.peer_bits)} to peers" if self.peer_bits else ""
        sent = f"sent {formats.format_bits(self.bits)}{peers}"
        return [*accuracy, f"loss {formats.format_number(self.loss)}", sent, f"dropped {self.dropped}"]


class ProgressDisplay:
    """Shows the progress of runs. This one shows nothing; `ProgressBars` and `ProgressLines` do."""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def follow(self, title: str, rounds: int, done: int = 0) -> RunCallback:
        """Return a callback that shows the progress of one run."""
        return lambda run, record: None


class ProgressBars(ProgressDisplay):
    """Live bars, one for each run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _MetricsColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
        )

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def follow(self, title: str, rounds: int, done: int = 0) -> RunCallback:
        metrics = LatestMetrics()
        bar = self._progress.add_task(title, total=rounds, completed=done, metrics=metrics)

        def show(run: Run, record: Mapping[str, Any]) -> None:
            metrics.update(record)
            self._progress.update(bar, completed=record["round"])

        return show


class ProgressLines(ProgressDisplay):
    """Plain lines for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def follow(self, title: str, rounds: int, done: int = 0) -> RunCallback:
        metrics, began, every = LatestMetrics(), time.monotonic(), max(1, rounds // MAX_LINES)

        def show(run: Run, record: Mapping[str, Any]) -> None:
            metrics.update(record)
            now = int(record["round"])
            if now % every == 0 or now == rounds:
                left = (time.monotonic() - began) / (now - done) * (rounds - now)
                parts = [f"{title}: round {now}/{rounds}", *metrics.texts(), f"{formats.format_duration(left)} left"]
                self._console.print("  ".join(parts), soft_wrap=True, markup=False)

        return show


class _MetricsColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("  ".join(task.fields["metrics"].texts()), style="cyan")


def progress_display(console: Console | None = None, quiet: bool = False) -> ProgressDisplay:
    """Return the display that suits a console (standard error by default): bars on a terminal or in a notebook."""
    if quiet:
        return ProgressDisplay()
    console = Console(stderr=True, highlight=False) if console is None else console
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
            (Console(stderr=True) if self._console is None else self._console).print(
                "[yellow]stopping after this round, then saving (interrupt again to stop at once)[/]"
            )
