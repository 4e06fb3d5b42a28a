"""The live report page: who may open it, what it shows, and how soon."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import hansa
from browser import Browser
from hansa.study.report import page
from hansa.study.report.live import ReportServer, RunWatcher
from recorded import add_rounds, begin_record

CONFIG = "name: {name}\nrounds: 40\ndata: {{name: fashion-mini, clients: 10}}\nalgorithm: fedavg\n"


class GrowingRun:
    """A run folder that grows round by round."""

    def __init__(self, path, name):
        self.path, self.round = path, 0
        begin_record(path)
        (path / "config.yaml").write_text(CONFIG.format(name=name))

    def grow(self, rounds=1, accuracy=0.5):
        for _ in range(rounds):
            self.round += 1
            sent = {"up_bytes": 100, "down_bytes": 100, "seconds": 1.0}
            add_rounds(self.path, [{"round": self.round, "test_accuracy": accuracy, **sent}])
        return self


@pytest.fixture
def served(tmp_path):
    """A run of three rounds below a folder that is watched and served."""
    grown = GrowingRun(tmp_path / "runs" / "deep" / "one", "one").grow(3)
    server = ReportServer(RunWatcher([tmp_path / "runs"]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server, grown
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def ask(server, path, host=None):
    line = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    line.request("GET", path, headers={} if host is None else {"Host": host})
    answer = line.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    line.close()
    return found


def test_it_is_served_on_loopback_to_whoever_has_the_token(served):
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    status, heads, text = ask(server, f"/{server.token}/")
    assert status == 200
    assert "<title>Federated runs, live</title>" in text
    assert (heads["Cache-Control"], heads["Referrer-Policy"]) == ("no-store", "no-referrer")
    for path in ("/", "/state", f"/{server.token[:-1]}/", f"/{server.token}x/"):
        assert ask(server, path)[0] == 403
    for path in (f"/{server.token}", f"/{server.token}/../../etc/passwd"):
        assert ask(server, path)[0] == 404


@pytest.mark.parametrize(("host", "status"), [
    ("localhost:9000", 200), ("127.0.0.1", 200), ("[::1]:80", 200),
    ("evil.example", 403), ("localhost.evil.example:80", 403), ("127.0.0.1.nip.io", 403), ("", 403),
])  # fmt: skip
def test_only_this_machine_is_a_host_whatever_port_a_tunnel_gives_it(served, host, status):
    server, _ = served
    assert ask(server, f"/{server.token}/", host)[0] == status


def test_changes_are_sent_and_waited_for(served):
    server, grown = served
    state = f"/{server.token}/state?since="
    first = json.loads(ask(server, state)[2])
    assert [run["name"] for run in first["content"]["runs"]] == ["one"]
    threading.Timer(0.3, lambda: grown.grow(1, accuracy=0.75)).start()
    begun = time.monotonic()
    news = json.loads(ask(server, state + first["version"])[2])
    assert time.monotonic() - begun > 0.2
    assert news["version"] != first["version"]
    assert news["content"]["runs"][0]["series"][0]["test_accuracy"] == [0.5, 0.5, 0.5, 0.75]


def test_runs_that_come_go_break_and_begin_again(tmp_path):
    watch = RunWatcher([tmp_path / "runs"])  # which is not there yet
    watch.refresh()
    assert "No run in" in str(watch.content["notices"])
    one = GrowingRun(tmp_path / "runs" / "one", "one")
    assert watch.refresh()
    assert "no completed round yet" in str(watch.content["notices"])
    one.grow(2)
    two = GrowingRun(tmp_path / "runs" / "two", "two").grow(3)
    assert watch.refresh()
    assert not watch.refresh()
    assert [len(run["series"][0]["test_accuracy"]) for run in watch.content["data"]["runs"]] == [2, 3]
    (two.path / "run.db").write_bytes(b"no database")
    (two.path / "metrics.jsonl").write_text("{}\n{}\n")
    watch.refresh()
    assert "two" in str(watch.content["notices"])
    assert [run["name"] for run in watch.content["data"]["runs"]] == ["one"]
    shutil.rmtree(two.path)
    watch.refresh()
    assert "two: deleted since it was last read" in str(watch.content["notices"])
    shutil.rmtree(one.path)
    GrowingRun(tmp_path / "runs" / "one", "one").grow(1, accuracy=0.25)  # begun anew
    watch.refresh()
    assert watch.content["data"]["runs"][0]["series"][0]["test_accuracy"] == [0.25]


HARMS = {
    "a pipe": lambda path: ((path / "run.db").unlink(), os.mkfifo(path / "run.db")),
    "sparse": lambda path: ((path / "environment.json").touch(), os.truncate(path / "environment.json", 1 << 40)),
    "nested": lambda path: (path / "environment.json").write_text("[" * 200_000),
    "endless": lambda path: (path / "summary.json").symlink_to("/dev/zero"),
    "no text": lambda path: (path / "config.yaml").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_hostile_folder_is_named_in_one_line_and_does_not_stop_the_page(tmp_path, harm):
    GrowingRun(tmp_path / "runs" / "bad", "bad").grow(2)
    HARMS[harm](tmp_path / "runs" / "bad")
    good = GrowingRun(tmp_path / "runs" / "good", "good").grow(2)
    watch = RunWatcher([tmp_path / "runs"])
    first = watch.newer_than("", 20)
    assert [run["name"] for run in first["content"]["runs"]] == ["good"]
    named = [notice for notice in watch.content["notices"] if "bad" in notice]
    assert len(named) == 1
    assert len(named[0]) < 800
    good.grow(1)
    news = watch.newer_than(first["version"], 20)
    assert news["content"]["runs"][0]["series"][0]["round"] == [1, 2, 3]
    assert not news["lost"]


def test_an_entry_that_cannot_be_drawn_is_left_out_and_named(tmp_path, monkeypatch):
    for name in ("bad", "good"):
        GrowingRun(tmp_path / "runs" / name, name).grow(2)

    def refuse(entries):
        if any(entry.name == "bad" for entry in entries):
            raise MemoryError("too many clients")

    monkeypatch.setattr(page, "differences", refuse)
    watch = RunWatcher([tmp_path / "runs"])
    watch.refresh()
    assert [run["name"] for run in watch.content["data"]["runs"]] == ["good"]
    assert any("bad: cannot be shown (MemoryError" in notice for notice in watch.content["notices"])


def test_a_failure_is_said_instead_of_live(tmp_path, monkeypatch):
    GrowingRun(tmp_path / "runs" / "one", "one").grow(1)
    watch = RunWatcher([tmp_path / "runs"])
    assert watch.newer_than("")["status"].startswith("live")
    working = watch.refresh
    monkeypatch.setattr(watch, "refresh", lambda: 1 / 0)
    assert watch.newer_than(watch.version, 1)["lost"]
    monkeypatch.setattr(watch, "refresh", working)
    answer = watch.newer_than(watch.version, 20)
    assert not answer["lost"]
    assert len(answer["content"]["runs"]) == 1


def test_a_port_in_use_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(hansa.HansaError, match=r"cannot listen on port \d+ of 127.0.0.1"):
            ReportServer(RunWatcher([tmp_path]), taken.getsockname()[1])


def test_the_command_says_where_and_ends_with_ctrl_c(tmp_path):
    GrowingRun(tmp_path / "runs" / "one", "one").grow(3)
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = heard + "import sys, hansa_command; sys.argv = ['hansa', 'watch', '--port', '0']; hansa_command.main()"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", child.stdout.readline())
        assert found
        line = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        line.request("GET", f"/{found[2]}/")
        assert line.getresponse().status == 200
        line.close()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=20) == 0
    finally:
        child.kill()
        child.communicate()


def test_a_browser_sees_new_rounds_and_keeps_what_was_chosen(served):
    server, grown = served
    browser = Browser()
    try:
        browser.open(server.address)
        rounds = "(report.charts.get('main-0')?.data[0] || []).length"
        browser.until(f"{rounds} === 3")
        browser.run("document.getElementById('log').click()")
        grown.grow(2)
        browser.until(f"{rounds} === {grown.round}")
        GrowingRun(grown.path.parent / "two", "two").grow(4)
        browser.until("document.querySelectorAll('#legend button').length === 2")
        assert browser.run("document.querySelectorAll('#ranking tbody tr').length") == 2
        assert browser.run("report.state.log")
        assert browser.console == []
    finally:
        browser.close()
