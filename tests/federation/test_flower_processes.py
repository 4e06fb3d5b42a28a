"""What runs on one machine: sockets of records, children that end with their parent, keys."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hansa.core.errors import HansaError
from hansa.federation import certificates, flower_processes
from hansa.federation.relay import APP
from hansa.federation.relay.hansa_relay import run_site_node, sockets


def test_records_cross_a_socket_whole_and_bounded(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        asking = sockets.connect(str(tmp_path / "s"))
        answering, _ = listener.accept()
    with asking, answering:
        sockets.check_owner(answering)
        big = os.urandom(3_000_000)
        writer = threading.Thread(target=sockets.send, args=(asking, {"op": "frame"}, big))
        writer.start()
        assert sockets.receive(answering, 3_000_000) == ({"op": "frame"}, big)
        writer.join()
        sockets.send(asking, {"op": "frame"}, b"12345")
        with pytest.raises(sockets.ConnectionClosed, match="at most"):
            sockets.receive(answering, 4)
        asking.close()
        answering.recv(100)
        with pytest.raises(sockets.ConnectionClosed, match="has closed"):
            sockets.receive(answering, 4)


def test_nobody_at_a_socket_is_said(tmp_path):
    with pytest.raises(sockets.ConnectionClosed, match="No such file"):
        sockets.connect(str(tmp_path / "nobody"))


class Peer:
    """A connection whose other end runs as some user."""

    def __init__(self, user: int) -> None:
        self.user = user

    def getsockopt(self, *what: int) -> bytes:
        return struct.pack("3i", 1, self.user, 1)


def test_another_user_is_refused():
    sockets.check_owner(Peer(os.getuid()))
    with pytest.raises(sockets.ConnectionClosed, match="runs as user"):
        sockets.check_owner(Peer(os.getuid() + 777))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_a_program_dies_with_whoever_started_it(tmp_path):
    text = (
        "import os, sys, pathlib\nfrom hansa.federation.flower_processes import ManagedProcess\n"
        "made = ManagedProcess(['sleep', '60'], dict(os.environ), pathlib.Path(sys.argv[1]))\n"
        "print(made.process.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    number = int(parent.stdout.readline())
    time.sleep(0.5)
    assert Path(f"/proc/{number}").exists()
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10
    while _runs(number) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(number)


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_site_has_programs_of_its_own_before_flowers(tmp_path):
    folder = flower_processes.write_task_programs(tmp_path / "bin")
    env = flower_processes.flower_environment(tmp_path, folder)
    assert env["PATH"].split(os.pathsep)[0] == str(folder)
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert "send_task.py" in (folder / "flwr-clientapp").read_text()
    assert subprocess.run([folder / "flwr-agentapp"], check=False).returncode == 1


def test_the_relay_imports_nothing_of_ours():
    for path in APP.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import torch" not in text
        assert "from hansa." not in text
        assert "import hansa." not in text


def test_a_missing_program_names_the_extra():
    with pytest.raises(HansaError, match=r"hansa\[flower\]"):
        flower_processes.find_program("flower-nonesuch")


def test_a_certificate_always_names_the_machine_itself(tmp_path):
    x509 = pytest.importorskip("cryptography.x509")
    certificates.make_keys(tmp_path / "keys", ["north"], ["fed.example.org", "10.0.0.1"])
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "127.0.0.1"]


def test_keys_are_for_their_owner_and_never_written_over(tmp_path):
    pytest.importorskip("cryptography")
    made = certificates.make_keys(tmp_path / "keys", ["north", "south"], ["localhost", "10.0.0.1"])
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)
    server = certificates.ServerKeys(tmp_path / "keys" / "server")
    assert server.public_bytes("north") != server.public_bytes("south")
    assert bytes.fromhex(server.public_bytes("north")).startswith(b"-----BEGIN PUBLIC KEY-----")
    assert certificates.SiteKeys(tmp_path / "keys" / "north").private.is_file()
    with pytest.raises(HansaError, match="not overwritten"):
        certificates.make_keys(tmp_path / "keys", ["north"])
    with pytest.raises(HansaError, match="hansa keys"):
        server.public("west")
    for name in ("../north", "server", ""):
        with pytest.raises(HansaError, match="expected letters"):
            certificates.make_keys(tmp_path / "others", [name])


def test_a_node_polls_often_during_a_run_and_seldom_otherwise(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(round(seconds, 3))
        now[0] += seconds

    monkeypatch.setattr(run_site_node.time, "monotonic", lambda: now[0])
    clock = run_site_node.ShortSleeps(sleep)
    clock.sleep(3)  # as Flower asks when there is no message
    for _ in range(3):
        clock.sleep(0.5)  # as it asks while a task is at work
    now[0] += 20
    clock.sleep(0.5)
    clock.sleep(3)
    now[0] += run_site_node.ACTIVE_SECONDS
    clock.sleep(3)
    assert slept == [0.5, 0.05, 0.05, 0.05, 0.5, 0.2, 0.5]
    assert clock.time() == pytest.approx(time.time(), abs=5)  # everything else is the module's


def test_the_arrival_of_a_message_is_marked_until_the_node_asks_again(tmp_path):
    waiting, runs = tmp_path / "waiting", iter([None, 7, 7, None])
    seen = []

    def pull(*, state):
        seen.append(waiting.exists())
        return next(runs)

    marked = run_site_node.mark_arrivals(pull, waiting)
    after = []
    for _ in range(4):
        assert marked(state=1) in (None, 7)
        after.append(waiting.exists())
    assert after == [False, True, True, False]
    assert seen == [False, False, False, False]
