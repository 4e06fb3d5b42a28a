"""A run as it goes: a live bar on a terminal, plain lines elsewhere, nothing when asked to be quiet."""

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

Follower: TypeAlias = "Callable[[Run, dict[str, Any]], bool | None]"

LINES = 20
"""How many plain lines a run gets at most."""


class Shown:
    """The newest numbers of a run: the last measured accuracy and loss; bits and lost clients so far."""

    def __init__(self) -> None:
        self.accuracy: float | None = None
        self.loss: float | None = None
        self.bits = self.peer_bits = 0
        self.lost = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Note a round."""
        self.accuracy = record.get("test_accuracy", self.accuracy)
        self.loss = record.get("test_loss", record.get("loss", record.get("train_loss", self.loss)))
        self.bits += 8 * (int(record.get("up_bytes") or 0) + int(record.get("down_bytes") or 0))
        self.peer_bits += 8 * int(record.get("peer_bytes") or 0)
        self.lost += int(record.get("lost") or 0)

    def fields(self) -> list[str]:
        """As they are printed."""
        found = [] if self.accuracy is None else [f"accuracy {formats.percent(self.accuracy)}"]
        sent = f"sent {formats.bits(self.bits)}" + (
            f" + {formats.bits(self.peer_bits)} to peers" if self.peer_bits else ""
        )
        return [*found, f"loss {formats.number(self.loss)}", sent, f"lost {self.lost}"]


class Bars:
    """Live bars, one a run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Numbers(),
            TimeRemainingColumn(compact=True),
            console=console,
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def follow(self, title: str, rounds: int, done: int = 0) -> Follower:
        """A callback that moves a bar of its own."""
        bar = self._progress.add_task(title, total=rounds, completed=done, shown=Shown())

        def follow(run: Run, record: Mapping[str, Any]) -> None:
            self._progress.tasks[bar].fields["shown"].take(record)
            self._progress.update(bar, completed=record["round"])

        return follow


class Lines:
    """Plain lines for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def follow(self, title: str, rounds: int, done: int = 0) -> Follower:
        """A callback that prints every so many rounds."""
        shown, began, every = Shown(), time.monotonic(), max(1, rounds // LINES)

        def follow(run: Run, record: Mapping[str, Any]) -> None:
            shown.take(record)
            now = int(record["round"])
            if now % every == 0 or now == rounds:
                left = (time.monotonic() - began) / (now - done) * (rounds - now)
                parts = [f"{title}: round {now}/{rounds}", *shown.fields(), f"{formats.duration(left)} left"]
                self._console.print("  ".join(parts), soft_wrap=True, markup=False)

        return follow


class Silence:
    """Nothing at all."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def follow(self, title: str, rounds: int, done: int = 0) -> Follower:
        """A callback that does nothing."""
        return lambda run, record: None


def progress(console: Console, quiet: bool) -> Bars | Lines | Silence:
    """What suits where the output goes."""
    if quiet:
        return Silence()
    return Bars(console) if console.is_terminal or _in_notebook(console) else Lines(console)


def progress_of(wanted: bool) -> Bars | Lines | Silence:
    """For Python: a bar on a terminal or in a notebook, lines elsewhere, nothing unless wanted."""
    return progress(Console(stderr=True, highlight=False) if wanted else Console(), not wanted)


def _in_notebook(console: Console) -> bool:
    """Whether a bar can live in a notebook: rich needs ipywidgets for that."""
    return console.is_jupyter and find_spec("ipywidgets") is not None


HANGUP = getattr(signal, "SIGHUP", None)
SIGNALS = tuple(name for name in (signal.SIGINT, signal.SIGTERM, HANGUP) if name is not None)


class Stopper:
    """Ctrl-C, a polite SIGTERM or a lost terminal stops after the round that is under way; a second one stops at once.

    A hangup that the caller ignores, as under ``nohup``, is ignored here too.

    Used as a context manager and as the callback that ends a run.
    """

    def __init__(self, console: Console | None, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._console, self._signals = console, signals
        self._before: dict[signal.Signals, Any] = {}
        self.caught: signal.Signals | None = None

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for name in self._signals:
                if name == HANGUP and signal.getsignal(name) == signal.SIG_IGN:
                    continue
                self._before[name] = signal.signal(name, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool:
        return self.caught is not None

    @property
    def code(self) -> int:
        """The exit code of a stopped command: 128 plus the signal's number, as shells have it."""
        return 0 if self.caught is None else 128 + self.caught

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number)
        with suppress(OSError):  # the terminal may be gone
            (Console(stderr=True) if self._console is None else self._console).print(
                "[yellow]stopping after this round; everything will be saved (again to stop at once)[/]"
            )


class _Numbers(ProgressColumn):
    """The newest numbers, between bar and clock."""

    def render(self, task: Task) -> Text:
        return Text("  ".join(task.fields["shown"].fields()), style="cyan")
