"""The report page in a browser: drawing, pointer, keyboard, legend, zoom, downloads."""

from __future__ import annotations

import json

import pytest

from browser import Browser
from hansa.study import report
from hansa.study.report import ReportEntry

from .test_page import asynchronous_run, history

MAIN = "report.charts.get('main-0')"
NASTY = "</script><img src=x onerror=alert(1)>&<b>"
COLOURS = f"[...new Set({MAIN}.series.slice(1).filter((s) => s.width > 2).map((s) => s.stroke()))].length"


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


def entries():
    counts = report.LabelCounts([[5, 0, 1], [0, 0, 9]], ["a", NASTY, "c"])
    rising = [0.2 + 0.01 * t for t in range(40)]
    group = [
        ReportEntry("group", history([a + d for a in rising], simulated=2.0), seed=s) for s, d in ((0, 0), (1, 0.1))
    ]
    lone = history([0.9 * a for a in rising], up=10, simulated=1.0)
    for record in lone:
        record.update(diversity=1.5, gamma=0.25, q=0.5, consensus=0.1, aggregate_norm=2.0, update_norm=1.0)
    return [
        ReportEntry.from_seeds("group", group),
        ReportEntry(NASTY, lone, f"name: {json.dumps(NASTY)}\n", labels=lambda: counts),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report.write_page(
        tmp_path_factory.mktemp("page") / "deep" / "report.html",
        entries(),
        title=NASTY,
        lead=NASTY,
        facts=[NASTY],
        problems=[NASTY],
    )


def box(browser, chart=MAIN):
    """The drawing area of a chart in the window: left, top, width, height."""
    found = f"(() => {{ const r = {chart}.over.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] }})()"
    browser.run(f"{chart}.root.scrollIntoView({{block: 'center'}})")
    return browser.run(found)


def painted(chart):
    return (
        f"(() => {{ const c = {chart}.ctx.canvas;"
        "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v) => v).length })()"
    )


def test_it_draws_without_a_word_on_the_console_and_asks_for_nothing(browser, page):
    browser.open(page)
    assert browser.run(COLOURS) == 2
    assert browser.run(f"{MAIN}.bands.length") == 1
    assert browser.run("[...document.querySelectorAll('#diagnostics figcaption')].map((c) => c.textContent)") == [
        "diversity", "gamma", "q", "consensus distance", "update norm", "aggregate norm"
    ]  # fmt: skip
    assert browser.run(painted(MAIN)) > 5000
    assert browser.run(painted("report.charts.get('heat-0')")) > 1000
    assert browser.console == []
    assert browser.requests == [page.as_uri()]


def test_markup_in_names_is_text(browser, page):
    browser.open(page)
    assert browser.run("document.images.length") == 0
    assert browser.run("document.title") == NASTY
    assert browser.run("[...document.querySelectorAll('#ranking b')].map((b) => b.textContent)") == ["group", NASTY]
    assert browser.run("[...document.querySelectorAll('#legend button')].map((b) => b.textContent)")[1] == NASTY
    left, top, width, height = box(browser)
    browser.mouse("mouseMoved", left + width / 2, top + height / 2)
    assert NASTY in browser.run("document.querySelector('#main .tip').textContent")
    assert browser.run("document.images.length") == 0


def test_the_pointer_and_arrow_keys_tell_the_numbers_of_a_round(browser, page):
    browser.open(page)
    browser.run("[...document.querySelectorAll('#smooth button')][0].click()")
    left, top, width, height = box(browser)
    browser.mouse("mouseMoved", left + width * 19 / 39, top + height / 2)
    assert browser.run("document.querySelector('#main .tip').innerText").split("\n") == [
        "round 20",
        "group",
        "44% ± 7.1%",  # the mean of 0.39 and 0.49, and their sample deviation
        NASTY,
        "35.1%",
    ]
    browser.run(f"{MAIN}.root.focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('#main .when').textContent") == "round 22"
    browser.press("Escape")
    assert browser.run("document.querySelector('#main .tip').hidden")


def test_the_legend_and_the_table_hide_and_show(browser, page):
    browser.open(page)
    browser.run("document.querySelectorAll('#legend button')[0].click()")
    assert browser.run(COLOURS) == 1
    assert browser.run("document.querySelectorAll('#legend button')[0].getAttribute('aria-pressed')") == "false"
    assert browser.run("document.querySelectorAll('tr.off').length") == 1
    browser.run("document.querySelectorAll('#legend button')[0].click()")
    assert browser.run(COLOURS) == 2
    browser.run("document.querySelector('tr[data-run=\"1\"]').click()")
    assert browser.run("[...report.state.hidden]") == [1]


def test_a_drag_zooms_and_a_double_click_shows_all(browser, page):
    browser.open(page)
    left, top, width, height = box(browser)
    browser.drag((left + width * 10 / 39, top + height / 2), (left + width * 20 / 39, top + height / 2))
    assert browser.run(f"[{MAIN}.scales.x.min, {MAIN}.scales.x.max].map(Math.round)") == [11, 21]
    browser.run("document.getElementById('log').click()")
    assert browser.run(f"Math.round({MAIN}.scales.x.min)") == 11  # another scale keeps the zoom
    browser.run(f"{MAIN}.over.dispatchEvent(new MouseEvent('dblclick', {{bubbles: true}}))")
    assert browser.run(f"[{MAIN}.scales.x.min, {MAIN}.scales.x.max]") == [1, 40]


def test_axes_and_metrics_are_chosen_and_curves_are_saved_as_csv(browser, page):
    browser.open(page)
    names = browser.run("[...document.querySelectorAll('#axis button')].map((b) => b.textContent)")
    assert names == ["rounds", "sent up", "server bits", "all bits", "simulated time", "wall time"]
    browser.run("document.querySelectorAll('#axis button')[1].click()")
    assert browser.run(f"{MAIN}.axes[0].label") == "bits sent up"
    assert browser.run(f"{MAIN}.scales.x.max") == 320_000
    browser.run("[...document.querySelectorAll('#metric button')].find((b) => b.textContent === 'diversity').click()")
    assert browser.run(COLOURS) == 1
    assert browser.console == []
    header, first, *_ = browser.run("report.csv()").splitlines()
    assert header.startswith("run,seed,test_accuracy,round")
    assert first.startswith('"group",0,0.2,1,')


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1180, True)])
def test_phones_and_dark_rooms(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth + 1)"
    marked = browser.run(f"{wide}.map((box) => getComputedStyle(box, '::before').content)")
    assert all("scroll sideways" in text for text in marked)
    assert marked or width > 1000  # on a phone the ranking is wider than the screen, and says so
    colour = browser.run("getComputedStyle(document.documentElement).backgroundColor")
    assert colour == ("rgb(18, 22, 28)" if dark else "rgb(251, 250, 247)")
    assert browser.run(COLOURS) == 2
    assert browser.console == []


def test_a_timeline_is_drawn_zoomed_and_read(browser, tmp_path):
    run = asynchronous_run()
    browser.open(run.report(tmp_path / "page.html"))
    chart = "report.charts.get('timeline-0')"
    assert browser.run(painted(chart)) > 1000
    left, top, width, _ = box(browser, chart)
    seconds = browser.run(f"{chart}.scales.x.max")
    browser.drag((left + 100, top + 30), (left + 300, top + 40))
    shown = browser.run(f"{chart}.scales.x.max - {chart}.scales.x.min")
    assert shown == pytest.approx(seconds * 200 / width, rel=0.02)
    row, start, *_, end, _, _ = browser.run("JSON.parse(document.getElementById('data').textContent)")["timelines"][0][
        "jobs"
    ][0]
    browser.run(f"{chart}.setScale('x', {{min: 0, max: {seconds}}})")
    where = f"{{left: {chart}.valToPos({(start + end) / 2}, 'x'), top: {chart}.valToPos({row + 0.5}, 'y')}}"
    browser.run(f"{chart}.setCursor({where})")
    assert "client" in browser.run("document.querySelector('[data-timeline] .tip').textContent")
    assert browser.console == []
