"""What is killed or stands still is continued or replaced, lost messages are sent again, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from federation.local_sites import LocalSites, server
from hansa.core.errors import HansaError
from hansa.federation import deliveries, flower_processes, owned_folders, superlink, supervisor, watchdog
from hansa.federation.deliveries import Deliveries, Node
from hansa.federation.flower_processes import EXECUTOR, RELAY_TASK, RunningProcess
from hansa.federation.serve import SITES
from hansa.federation.transport import PAUSE_SECONDS, EnrollingTransport

linux = pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")


class Processes:
    """A table of processes that a test changes."""

    def __init__(self, *programs: str) -> None:
        self.table = [RunningProcess(at + 1, program, False) for at, program in enumerate(programs)]
        self.now = 0.0

    def __call__(self, home):
        return self.table

    def watchdog(self, folder):
        home = folder / "flwr"
        home.mkdir()
        return watchdog.Watchdog(home, "north", processes=self, clock=lambda: self.now)


def test_an_executor_that_ends_is_a_reason_to_restart(tmp_path):
    processes = Processes("flower-supernode", EXECUTOR)
    dog = processes.watchdog(tmp_path)
    assert dog.check() is None
    processes.table = processes.table[:1]
    reasons = [dog.check() for _ in range(watchdog.MISSING_CHECKS)]
    assert reasons[:-1] == [None] * (watchdog.MISSING_CHECKS - 1)
    assert reasons[-1] == "flower-superexec has ended"


def test_an_executor_has_a_minute_to_start(tmp_path):
    processes = Processes("flower-supernode")
    dog = processes.watchdog(tmp_path)
    assert dog.check() is None
    processes.now = watchdog.START_SECONDS + 1
    assert "did not start" in dog.check()


@linux
def test_a_stopped_process_is_continued_and_then_replaced(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        processes = Processes()
        processes.table = [RunningProcess(child.pid, EXECUTOR, True)]
        dog = processes.watchdog(tmp_path)
        assert [dog.check() for _ in range(watchdog.STOPPED_CHECKS)] == [None] * watchdog.STOPPED_CHECKS
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state in "SR"
        reasons = [dog.check() for _ in range(watchdog.STOPPED_CHECKS)]
        assert "cannot be continued" in reasons[-1]
    finally:
        child.kill()
        child.wait()


def test_a_task_that_was_killed_or_never_ran_is_noticed(tmp_path):
    processes = Processes("flower-supernode", EXECUTOR)
    dog = processes.watchdog(tmp_path)
    waiting = tmp_path / flower_processes.WAITING
    waiting.touch()
    os.utime(waiting, (time.time() - 2 * watchdog.IDLE_SECONDS,) * 2)
    processes.table.append(RunningProcess(9, RELAY_TASK, False))
    processes.now = 2 * watchdog.IDLE_SECONDS
    assert dog.check() is None, "a task is working on it, however long that takes"
    processes.table.pop()
    processes.now += watchdog.IDLE_SECONDS + 1
    assert "no task is working on" in dog.check()
    waiting.unlink()
    assert dog.check() is None
    (tmp_path / flower_processes.LOST).touch()
    assert dog.check() == "flwr-clientapp was killed"


@linux
def test_the_script_of_a_task_leaves_a_mark_if_the_task_is_killed(tmp_path):
    folder = flower_processes.write_task_programs(tmp_path / "bin")
    (tmp_path / "relay.py").write_text(
        "import os, socket, sys\nlistener = socket.socket(socket.AF_UNIX)\nlistener.bind(sys.argv[1])\n"
        "listener.listen(1)\nprint(flush=True)\nfor code in (b'3\\n', b''):\n"
        "    peer, _ = listener.accept()\n    peer.recv(100)\n    peer.sendall(code)\n    peer.close()\n"
    )
    relay = subprocess.Popen(
        [sys.executable, tmp_path / "relay.py", tmp_path / flower_processes.TASKS], stdout=subprocess.PIPE
    )
    try:
        relay.stdout.readline()
        assert subprocess.run([folder / RELAY_TASK, "--token", "x"], check=False).returncode == 3
        assert not (tmp_path / flower_processes.LOST).exists()
        assert subprocess.run([folder / RELAY_TASK, "--token", "x"], check=False).returncode == 137
        assert (tmp_path / flower_processes.LOST).exists()
    finally:
        relay.kill()
        relay.communicate()


@linux
def test_whatever_has_the_folder_is_killed_with_it_also_outside_the_group(tmp_path):
    home = tmp_path / "flwr"
    command = [
        sys.executable,
        "-c",
        "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    ]
    subprocess.run(command, env={**os.environ, flower_processes.HOME: str(home)}, check=True)
    assert [each.program for each in flower_processes.running_processes(home)] == ["sleep"]
    flower_processes.kill_all(home)
    assert flower_processes.running_processes(home) == []


@linux
def test_folders_of_dead_processes_are_removed_with_their_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(owned_folders.tempfile, "gettempdir", lambda: str(tmp_path))
    mine = owned_folders.OwnedFolder("hansa-link-")
    assert mine.path.parent == tmp_path
    assert mine.path.stat().st_mode & 0o077 == 0
    stale = owned_folders.OwnedFolder("hansa-node-")
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, flower_processes.HOME: str(stale.path / "flwr")})
    (stale.path / owned_folders.OWNER).write_text(f"{os.getpid()} 12345")  # this number, but started at another time
    new, old = tmp_path / "hansa-link-new", tmp_path / "hansa-link-old"
    for folder in (new, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    assert sorted(owned_folders.remove_stale()) == sorted([stale.path, old])
    assert child.wait(10) == -signal.SIGKILL
    assert mine.path.exists()
    assert new.exists()
    mine.remove()
    assert not mine.path.exists()


def test_a_message_is_lost_when_a_later_one_was_answered():
    node, now = Node("7", "then"), 0.0
    sent = Deliveries()
    sent.add(5, "north", node, now)
    assert sent.probes(deliveries.PROBE_SECONDS - 1) == []
    ((probe, where),) = sent.probes(deliveries.PROBE_SECONDS)
    assert where == node
    assert probe < 0
    assert sent.probes(deliveries.PROBE_SECONDS + 1) == [], "one probe at a time"
    assert not sent.probe_answered(5, 11.0)
    assert sent.probe_answered(probe, 11.0)
    assert sent.lost({"north": node}, 12.0) == [], "its answer may be on the way"
    assert [ticket for ticket, _, _ in sent.lost({"north": node}, 11.1 + deliveries.GRACE_SECONDS)] == [5]
    assert sent.answered(5, "7") is None
    sent.add(5, "north", node, 30.0)  # it is sent again under the same ticket
    assert sent.answered(5, "8") is None, "from another node"
    assert sent.answered(5, "7") == "north"


def test_a_node_that_works_for_an_hour_has_lost_nothing():
    node = Node("7", "then")
    sent = Deliveries()
    sent.add(1, "north", node, 0.0)
    probes = [probe for now in range(3600) for probe, _ in sent.probes(float(now))]
    assert 50 < len(probes) < 70
    assert sent.lost({"north": node}, 3600.0) == []
    assert sent.lost({}, 3600.0) == [], "it is offline, and may come back with the answer"
    assert sent.clear() == [(1, "north")]


class Sleeper:
    """Connections whose next check takes long once: the process was stopped. Then there is an answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.checks = seconds, 0.0, 0

    def send(self, *message) -> None: ...

    def receive(self, timeout):
        self.checks += 1
        self.now += self.seconds if self.checks == 2 else timeout
        return []

    def online(self):
        return frozenset({"north"})


@pytest.mark.parametrize(("seconds", "checks"), [(PAUSE_SECONDS - 1, 52), (1000.0, 61)])
def test_the_time_in_which_the_server_stood_still_does_not_count(seconds, checks):
    connections = Sleeper(seconds)
    transport = EnrollingTransport(
        connections, {"north": b""}, lambda *_: None, deadline=60.0, clock=lambda: connections.now
    )
    transport.send("north", b"frame")
    assert transport.receive() == []
    assert connections.checks == pytest.approx(checks, abs=1)


def test_a_server_that_died_before_round_one_starts_again(tmp_path):
    """It has written its configuration, but not yet what its sites have."""
    sites = LocalSites(tmp_path / "sites")
    first = server(sites).new(tmp_path / "run")
    first.folder.lock.release()
    first.run.store.close()
    (first.folder / SITES).unlink()
    again = server(sites).resume(tmp_path / "run")
    again.execute()
    assert (again.folder / SITES).is_file()
    whole = server(LocalSites(tmp_path / "others")).new(tmp_path / "whole")
    whole.execute()
    assert again.folder.read_model() == whole.folder.read_model()


def test_a_lost_update_is_named_in_the_summary(tmp_path):
    sites = LocalSites(tmp_path / "sites")
    serving = server(sites, "sample=null", "rounds=2")
    experiment = serving.new(tmp_path / "run")
    now = [0.0]
    serving.transport.clock = lambda: now[0]

    def idle():
        now[0] += 5.0

    sites.idle = idle
    experiment.execute([lambda run, record: sites.away.add("south")])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lost_updates"] == [
        {"site": "south", "client": client, "round": 2, "reason": "silent"} for client in (3, 4, 5)
    ]


class BrokenLink(superlink.SuperLink):
    """A SuperLink whose programs are functions."""

    def __init__(self, failures: int) -> None:
        self.failures, self.starts = failures, 0
        self._link = self._relay = self._stuck = None
        self._seen = time.monotonic()
        self._nodes = {}

    def _start_link(self) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise HansaError("flwr run: connection refused")

    def _start_app(self) -> None: ...


@pytest.mark.parametrize(("reason", "most"), [("flower-superlink has ended", superlink.RESTARTS), (None, 3)])
def test_a_start_that_fails_is_tried_again(reason, most, monkeypatch):
    """The app was killed, and the SuperLink while the app was being restarted: the server goes on."""
    monkeypatch.setattr(superlink.time, "sleep", lambda seconds: None)
    link = BrokenLink(most - 1)
    link._restart(reason)
    assert link.starts == most
    with pytest.raises(HansaError, match=f"did not start in {most} attempts: flwr run: connection refused"):
        BrokenLink(most)._restart(reason)


def test_a_port_in_use_is_said_at_once(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(HansaError, match=r"in use\. Use another --port"):
            superlink._check_port("127.0.0.1", taken.getsockname()[1])


PROGRAM = """
import os, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
count = len(path.read_text()) if path.exists() else 0
path.write_text('x' * (count + 1))
action = sys.argv[2 + count]
if action == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if action == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
if action == "wait":
    time.sleep(60)
sys.exit(int(action) if action.isdigit() else 0)
"""


def supervised(monkeypatch, tmp_path, *actions):
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "MAX_PAUSE", 0.0)
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = [str(tmp_path / "starts"), *actions]
    return supervisor.supervise(arguments, program=[sys.executable, str(tmp_path / "program.py")])


@linux
@pytest.mark.parametrize(
    ("actions", "code"), [(["kill", "stop", "0"], 0), (["1", "kill", "2"], 2), (["1"] * supervisor.MAX_FAILURES, 1)]
)
def test_a_supervised_command_is_restarted_until_it_ends_by_itself(actions, code, tmp_path, monkeypatch, caplog):
    assert supervised(monkeypatch, tmp_path, *actions) == code
    starts = len((tmp_path / "starts").read_text())
    assert starts == (2 if "stop" in actions else len(actions)), "a stopped one is continued, not restarted"
    assert ("stood still" in caplog.text) == ("stop" in actions)


@linux
def test_a_signal_to_the_supervisor_ends_the_command(tmp_path, monkeypatch):
    def end() -> None:
        while not (tmp_path / "starts").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    assert supervised(monkeypatch, tmp_path, "wait", "0") == 143
    assert (tmp_path / "starts").read_text() == "x"
