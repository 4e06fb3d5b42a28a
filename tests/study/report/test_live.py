"""The live report page: who may open it, what it shows, and how soon."""

from __future__ import annotations

import http.client
import json
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
from hansa.runs import metrics_log
from hansa.study.report.live import ReportServer, RunWatcher

CONFIG = "name: {name}\nrounds: 40\ndata: {{name: fashion-mini, clients: 10}}\nalgorithm: fedavg\n"


class GrowingRun:
    """A run folder that grows round by round."""

    def __init__(self, path, name):
        self.path, self.seal, self.round = path, metrics_log.INITIAL_SEAL, 0
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(CONFIG.format(name=name))

    def grow(self, rounds=1, accuracy=0.5, cut=False):
        for _ in range(rounds):
            self.round += 1
            record = {
                "round": self.round,
                "test_accuracy": accuracy,
                "up_bytes": 100,
                "down_bytes": 100,
                "seconds": 1.0,
            }
            line, self.seal = metrics_log.seal_record(record, self.seal)
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(line[: len(line) // 2] if cut else line + "\n")
        return self


@pytest.fixture
def served(tmp_path):
    """A run of three rounds below a folder that is watched and served."""
    grown = GrowingRun(tmp_path / "runs" / "deep" / "one", "one").grow(3)
    watch = RunWatcher([tmp_path / "runs"])
    watch.start()
    server = ReportServer(watch)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server, grown
    server.shutdown()
    server.server_close()
    watch.close()
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
    status, heads, page = ask(server, f"/{server.token}/")
    assert status == 200
    assert "<title>Federated runs, live</title>" in page
    assert (heads["Cache-Control"], heads["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert ask(server, f"/{server.token}")[1]["Location"] == f"/{server.token}/"
    for path in ("/", "/state", f"/{server.token[:-1]}/", f"/{server.token}x/"):
        assert ask(server, path)[0] == 403
    assert ask(server, f"/{server.token}/../../etc/passwd")[0] == 404


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
    threading.Timer(0.3, lambda: grown.grow(2, accuracy=0.75)).start()
    begun = time.monotonic()
    news = json.loads(ask(server, state + first["version"])[2])
    assert time.monotonic() - begun > 0.2
    assert news["version"] != first["version"]
    assert news["content"]["runs"][0]["series"]["test_accuracy"] == [0.5, 0.5, 0.5, 0.75, 0.75]


def test_runs_that_come_go_break_and_begin_again(tmp_path):
    watch = RunWatcher([tmp_path / "runs"])  # which is not there yet
    watch.refresh()
    assert "No run in" in watch.parts["notices"]
    one = GrowingRun(tmp_path / "runs" / "one", "one")
    assert watch.refresh()
    assert "no completed round yet" in watch.parts["notices"]
    one.grow(2)
    two = GrowingRun(tmp_path / "runs" / "two", "two").grow(3).grow(cut=True)
    assert watch.refresh()
    assert not watch.refresh()
    assert [len(run["series"]["test_accuracy"]) for run in watch.content["runs"]] == [2, 3]
    (two.path / "metrics.jsonl").write_text("{}\n{}\n")
    watch.refresh()
    assert "two" in watch.parts["notices"]
    assert [run["name"] for run in watch.content["runs"]] == ["one"]
    shutil.rmtree(two.path)
    watch.refresh()
    assert "two: deleted since it was last read" in watch.parts["notices"]
    shutil.rmtree(one.path)
    GrowingRun(tmp_path / "runs" / "one", "one").grow(1, accuracy=0.25)  # begun anew
    watch.refresh()
    assert watch.content["runs"][0]["series"]["test_accuracy"] == [0.25]


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


def test_a_browser_sees_new_rounds_within_two_seconds_and_keeps_what_was_chosen(served):
    server, grown = served
    browser = Browser()
    try:
        browser.open(server.address)
        rounds = "(plots.state.data.runs[0]?.series.round || []).length"
        browser.until(f"{rounds} === 3")
        browser.run("document.getElementById('log').click()")
        waits = []
        for _ in range(3):
            begun = time.monotonic()
            grown.grow(2)
            browser.until(f"{rounds} === {grown.round}", seconds=20)
            waits.append(time.monotonic() - begun)
        assert min(waits) < 2 * slowness()
        GrowingRun(grown.path.parent / "two", "two").grow(4)
        browser.until("document.querySelectorAll('[data-name=main] path.line').length === 2")
        assert browser.run("document.querySelectorAll('#ranking tbody tr').length") == 2
        assert browser.run("plots.state.log")
        assert browser.console == []
    finally:
        browser.close()


def slowness():
    """How many times slower this machine is just now than one that has nothing else to do, at least 1."""
    begun, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.1:
        pass
    return max(1.0, (time.monotonic() - begun) / 0.1)
