"""The progress of a study on a terminal: one line for all runs, one for each run under way, whatever the width."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from hansa.study.report.progress import LatestNumbers, ProgressDisplay


def lines(display: ProgressDisplay) -> list[str]:
    page = Console(width=display.console.width, file=io.StringIO(), force_terminal=False)
    page.print(display.bars.get_renderable())
    assert isinstance(page.file, io.StringIO)
    return page.file.getvalue().splitlines()


def numbers(dropped: int = 0) -> str:
    return LatestNumbers().add({"test_accuracy": 0.7423, "test_loss": 0.7181, "up_bytes": 5e8, "lost": dropped})


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "accuracy 74.2%"),
        (120, "accuracy 74.2%  loss 0.718  dropped 3  sent 4 Gbit"),
    ],
)
def test_the_bars_of_24_runs_have_a_line_each_and_one_for_all(width: int, shown: str) -> None:
    written = io.StringIO()
    display = ProgressDisplay(Console(width=width, file=written, force_terminal=True, color_system=None), live=True)
    display.expect(24 * 40)
    with display:
        for number in (0, 1):
            display.follow(f"local.lr=0.05, seed {number}", 40).update(40, numbers())
        runs = [display.follow(f"local.lr=0.05, seed {number}", 40) for number in (2, 3)]
        for run in runs:
            run.update(20, numbers(dropped=3))
        total, *others = lines(display)
        assert len(others) == 2
        assert total.startswith("all runs")
        assert "120/960 2 runs finished" in total
        assert total.endswith(" left")
        for line in others:
            assert len(line) <= width
            assert f" {shown}" in line
            assert " 20/40 " in line
            assert line.endswith(" left")
    finished = [line for line in written.getvalue().splitlines() if ": 40 rounds" in line]
    assert len(finished) == 2
    assert all("accuracy 74.2%  loss 0.718  sent 4 Gbit" in line for line in finished)


def test_long_titles_leave_room_for_numbers() -> None:
    display = ProgressDisplay(Console(width=80, file=io.StringIO(), force_terminal=True), live=True)
    display.follow("server.options.momentum=0.9, local.lr=0.05, sample.participation=0.1, seed 3", 400).update(
        7, numbers()
    )
    (line,) = lines(display)
    assert "…" in line
    assert "accuracy 74.2%" in line


def test_bars_need_no_thread() -> None:
    before = threading.active_count()
    with ProgressDisplay(Console(file=io.StringIO(), force_terminal=True), live=True) as display:
        display.follow("a", 4).update(2, numbers())
        assert threading.active_count() == before


def test_notes_on_a_topic_are_printed_once() -> None:
    """Every seed draws clients of other sizes: a study says once that they count equally."""
    written = io.StringIO()
    display = ProgressDisplay(Console(file=written, width=80))
    for text, topic in (("clients of 3 to 5 rows", "weights"), ("clients of 2 to 6 rows", "weights"), ("kernels", "")):
        display.print_once(text, topic)
        display.print_once(text, topic)
    assert written.getvalue().splitlines() == ["clients of 3 to 5 rows", "kernels"]


def test_lines_have_the_numbers_and_the_time_left_of_the_run_and_of_the_study() -> None:
    written = io.StringIO()
    display = ProgressDisplay(Console(file=written, width=80))
    display.expect(80)
    display.skip(20)
    run = display.follow("a", 40)
    for round in range(1, 41):
        run.update(round, numbers())
    first, *_, last = written.getvalue().splitlines()
    assert len(written.getvalue().splitlines()) == 20
    assert first.startswith("a: round 2/40  accuracy 74.2%  loss 0.718")
    assert last.startswith("a: round 40/40")
    assert "0 ms left" in last
    assert "all runs: " in last


def test_numbers_are_the_newest_measured_and_totals() -> None:
    numbers, sent = LatestNumbers(), {"up_bytes": 1000, "down_bytes": 250}
    numbers.add({"round": 1, "test_accuracy": 0.25, "test_loss": 1.5, "lost": 2, **sent})
    text = numbers.add({"round": 2, "train_loss": 1.25, "lost": 1, **sent})
    assert text == "accuracy 25.0%  loss 1.25  dropped 3  sent 20 kbit"
