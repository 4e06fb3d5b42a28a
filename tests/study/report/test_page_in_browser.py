"""The report page in a browser: drawing, pointer, keyboard, legend, zoom, downloads."""

from __future__ import annotations

import json

import pytest

from browser import Browser
from hansa.study import report
from hansa.study.report import ReportEntry

from .test_page import history

CURVES = "document.querySelectorAll('[data-name=main] path.line').length"
NASTY = "</script><img src=x onerror=alert(1)>&<b>"


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


def entries():
    rising = [0.2 + 0.01 * t for t in range(40)]
    group = [
        ReportEntry("group", history([a + d for a in rising], simulated=2.0), seed=s) for s, d in ((0, 0), (1, 0.1))
    ]
    lone = history([0.9 * a for a in rising], up=10, simulated=1.0)
    for record in lone:
        record.update(diversity=1.5, gamma=0.25, q=0.5, consensus=0.1, aggregate_norm=2.0, update_norm=1.0)
    return [
        ReportEntry.from_seeds("group", group),
        ReportEntry(NASTY, lone, f"name: {json.dumps(NASTY)}\n"),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report.write_page(
        tmp_path_factory.mktemp("page") / "report.html", entries(), title=NASTY, lead=NASTY, facts=[NASTY]
    )


def test_it_draws_without_a_word_on_the_console_and_asks_for_nothing(browser, page):
    browser.open(page)
    assert browser.run(CURVES) == 2
    assert browser.run("document.querySelectorAll('[data-name=main] path.band').length") == 1
    assert browser.run("[...document.querySelectorAll('#diagnostics .plot')].map((p) => p.dataset.name)") == [
        f"diagnostics-{name}" for name in ("diversity", "gamma", "q", "consensus", "update_norm", "aggregate_norm")
    ]
    assert browser.console == []
    assert browser.requests == [page.as_uri()]


def test_markup_in_names_is_text(browser, page):
    browser.open(page)
    assert browser.run("document.images.length") == 0
    assert browser.run("document.title") == NASTY
    assert browser.run("[...document.querySelectorAll('#ranking b')].map((b) => b.textContent)") == ["group", NASTY]
    assert browser.run("[...document.querySelectorAll('#legend button')].map((b) => b.textContent)")[1] == NASTY


def point(browser, share):
    """A place in the main figure, this share of the way along its axis."""
    box = browser.run("JSON.stringify(document.querySelector('[data-name=main] .axis').getBoundingClientRect())")
    at = json.loads(box)
    return at["x"] + share * at["width"], at["y"] - 40


def test_pointing_tells_the_numbers_of_that_round(browser, page):
    browser.open(page)
    browser.run("[...document.querySelectorAll('#smooth button')][0].click()")
    browser.run("document.querySelector('[data-name=main]').scrollIntoView({block: 'center'})")
    browser.mouse("mouseMoved", *point(browser, 0.5))
    assert browser.run("document.querySelector('[data-name=main] .tip').innerText").split("\n") == [
        "round 20",
        "group",
        "44.0% ± 7.1%",  # the mean of 0.39 and 0.49, and their sample deviation
        NASTY,
        "35.1%",
    ]


def test_arrow_keys_tell_them_too(browser, page):
    browser.open(page)
    browser.run("document.querySelector('[data-name=main] svg').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('[data-name=main] .when').textContent") == "round 2"
    browser.press("Escape")
    assert browser.run("document.querySelector('[data-name=main] .tip').hidden")


def test_the_legend_hides_and_shows(browser, page):
    browser.open(page)
    browser.run("document.querySelectorAll('#legend button')[0].focus()")
    browser.press("Enter")
    assert browser.run(CURVES) == 1
    assert browser.run("document.querySelectorAll('#legend button')[0].getAttribute('aria-pressed')") == "false"
    assert browser.run("document.querySelectorAll('tr.off').length") == 1
    browser.run("document.querySelectorAll('#legend button')[0].click()")
    assert browser.run(CURVES) == 2
    browser.run("document.querySelector('tr[data-run=\"1\"]').click()")
    assert browser.run("document.querySelector('[data-name=main] path.line').dataset.run") == "0"


def test_a_drag_zooms_and_a_double_click_shows_all(browser, page):
    browser.open(page)
    browser.run("document.querySelector('[data-name=main]').scrollIntoView({block: 'center'})")
    ticks = "document.querySelector('[data-name=main]').textContent"
    assert "40" in browser.run(ticks)
    browser.drag(point(browser, 0.25), point(browser, 0.5))
    assert browser.run("JSON.stringify(plots.state.zoom.round.map(Math.round))") == "[10,20]"
    browser.run("document.querySelector('[data-name=main] svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.run("JSON.stringify(plots.state.zoom)") == "{}"


def test_axes_and_metrics_are_chosen(browser, page):
    browser.open(page)
    names = browser.run("[...document.querySelectorAll('#axis button')].map((b) => b.textContent)")
    assert names == ["rounds", "sent up", "server bits", "all bits", "simulated time", "wall time"]
    browser.run("document.querySelectorAll('#axis button')[1].click()")
    assert "bits sent up" in browser.run("document.querySelector('[data-name=main]').textContent")
    browser.run("[...document.querySelectorAll('#metric button')].find((b) => b.textContent === 'diversity').click()")
    assert browser.run(CURVES) == 1
    assert browser.console == []


def test_a_figure_is_saved_as_a_picture_of_its_own(browser, page):
    browser.open(page)
    saved = browser.run("plots.standalone(document.querySelector('[data-name=main]')).text")
    assert saved.startswith("<svg")
    assert saved.count("<path") == 4
    assert "NaN" not in saved
    source = f"'data:image/svg+xml;charset=utf-8,' + encodeURIComponent({json.dumps(saved)})"
    loads = "const i = new Image(); i.onload = () => done(true); i.onerror = () => done(false);"
    assert browser.run(f"new Promise((done) => {{ {loads} i.src = {source}; }})")


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
    assert browser.run(CURVES) == 2
    assert browser.console == []
