"""The two ends of Flower, as far as they can be tested without it; tests/e2e/test_flower.py has the rest."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hansa.core.errors import HansaError
from hansa.federation import certificates, flower


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(flower.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(flower.sys, "executable", "/nowhere/python")
    with pytest.raises(HansaError, match=r"hansa\[flower\]"):
        flower.SiteNode("north", "localhost:1", None, limit=1)


def test_a_port_in_use_is_said_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(HansaError, match=r"in use\. Use another --port"):
            flower._check_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("code", "reason"), [(412, "does not know the key"), (401, "clock"), (404, "HTTP 404"), (None, "cannot be reached")]
)
def test_a_refusal_is_one_sentence(code, reason):
    error = OSError("no route")
    if code is not None:
        error.__dict__["response"] = SimpleNamespace(status_code=code)
    assert reason in flower.describe(error)
    wrapped = ConnectionError("TLS")
    wrapped.__cause__ = ssl.SSLCertVerificationError(1, "x")
    wrapped.__cause__.verify_message = "certificate has expired"
    assert flower.describe(wrapped) == "the server's certificate is not accepted: certificate has expired"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_a_superlink_dies_with_its_server():
    text = (
        "import os, subprocess, sys\nfrom hansa.federation.flower import _END_WITH_PARENT as code\n"
        "child = subprocess.Popen([sys.executable, '-c', code, str(os.getpid()), '/bin/sleep', '60'])\n"
        "print(child.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = Path(f"/proc/{int(parent.stdout.readline())}/stat")
    end = time.monotonic() + 20.0
    while "(sleep)" not in child.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    parent.kill()
    parent.communicate()
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert time.monotonic() < end


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
    server = certificates.Keys(tmp_path / "keys" / "server")
    own = certificates.Keys(tmp_path / "keys" / "north").private_key().public_key()
    assert server.public_key("north") == own != server.public_key("south")
    with pytest.raises(HansaError, match="not overwritten"):
        certificates.make_keys(tmp_path / "keys", ["north"])
    with pytest.raises(HansaError, match="hansa keys"):
        server.public_key("west")
    os.truncate(tmp_path / "keys" / "server" / "sites" / "south.pub", 20)
    with pytest.raises(HansaError, match="not a public key"):
        server.public_key("south")
    for name in ("../north", "server", ""):
        with pytest.raises(HansaError, match="expected letters"):
            certificates.make_keys(tmp_path / "others", [name])
