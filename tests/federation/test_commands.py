"""``hansa serve``, ``join`` and ``keys`` as they are typed, with sites inside the process in Flower's place."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_line import run_command, run_well
from federation.problems import TEXT, LocalSites
from hansa.config import load
from hansa.core.errors import HansaError
from hansa.data import Schema, TableColumn
from hansa.federation import certificates, flower
from hansa.federation.exchange_log import ExchangeLog
from hansa.federation.server import Server
from hansa.runs.folder import RunFolder


def test_the_environment_that_has_flower_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(flower.shutil, "which", lambda *names, **options: None)
    monkeypatch.setattr(flower.sys, "prefix", str(tmp_path))
    program = tmp_path / "flower" / "bin" / "hansa"
    for found in (False, True):
        with pytest.raises(HansaError, match=r"pip install 'hansa\[flower\]'") as raised:
            flower._find_superlink()
        assert (f"run {program}" in str(raised.value)) == found
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch()


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = LocalSites(tmp_path / "sites")
    made.address, made.close, made.describe = "nowhere:1", lambda: None, lambda **facts: made.facts.update(facts)
    made.facts = {}
    monkeypatch.setattr(flower, "SuperLink", lambda sites, keys, **options: made)
    Path("a.yaml").write_text(TEXT)
    Path("b.yaml").write_text(TEXT.replace("trial", "other").replace("fedavg", "scaffold"))
    return made


def hansa(*arguments):
    result = run_command(*arguments)
    return result.exit_code, result.output


def test_one_configuration_is_served_and_taken_up_again(sites):
    output = run_well("serve", "a.yaml", "--insecure", "--rounds", "2", "-o", "run", "--quiet").output
    assert "anyone who can reach the port" in output
    assert len(RunFolder("run").history) == 2
    sites.kill("north")
    resume = ["serve", "a.yaml", "--insecure", "--rounds", "4", "-o", "run", "--resume", "--quiet"]
    for change, key in (("local.lr=50", "local.lr is"), ("model=mlp", "model.name is"), ("seed=3", "seed is 0, req")):
        code, output = hansa(*resume, "--set", change)
        assert (code, key in " ".join(output.split())) == (2, True), output
    run_well(*resume)
    assert len(RunFolder("run").history) == 4


def test_sites_are_told_that_the_run_is_over_and_what_left_them_is_on_their_page(sites, tmp_path):
    from hansa.cli.federate import show_exchanges

    run_well("serve", "a.yaml", "--insecure", "--rounds", "2", "-o", "run", "--quiet")
    agent = sites.agent("north")
    assert agent.over
    assert (sites.facts["rounds"], sites.facts["round"]()) == (2, 2)
    agent.handle(b"nonsense <b>")
    show_exchanges(agent, tmp_path / "page.html", 0)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    sent = sum(len(answer) for site, _, answer in sites.seen if site == "north")
    exchanges = agent.exchange_log.exchanges
    assert sum(exchange.sent_bytes for exchange in exchanges) <= sent, "without the frame around several"
    assert [exchange.sent for exchange in exchanges].count("updates of clients") == 2
    for text in ("<h1>Site north</h1>", "updates of clients", "malformed", "label_counts", "nothing: the run is over"):
        assert text in page
    assert "<b>" not in page
    assert ExchangeLog(agent.exchange_log.path).exchanges == exchanges, "it is on disk"


def test_the_server_checks_its_own_part_before_it_waits(sites, monkeypatch):
    monkeypatch.setattr(flower, "SuperLink", lambda *_, **options: pytest.fail("it waits for sites"))
    for change, problem in (("model=nonesuch", "nonesuch"), ("data.name=nonesuch", "nonesuch"), ("algorithm=x", "x")):
        code, output = hansa("serve", "a.yaml", "--insecure", "--set", change)
        assert (code, problem in output) == (2, True), output


def test_the_server_checks_its_model_also_before_the_sites_agree_on_scales(sites, tmp_path, monkeypatch):
    columns = (TableColumn("age", "number", scale="pooled"), TableColumn("y", "target", categories=("0", "1")))
    Schema(columns).save(tmp_path / "schema.yaml")
    monkeypatch.setattr(flower, "SuperLink", lambda *_, **options: pytest.fail("it waits for sites"))
    text = "rounds: 1\ndata: {name: csv-folder, options: {schema: SCHEMA}}\n"
    text += "model: {name: logistic, metrics: {auc: roc_auc}}\n"
    text += "engine: {kind: flower, sites: {north: 1, south: 1}}\n"
    Path("tables.yaml").write_text(text.replace("SCHEMA", str(tmp_path / "schema.yaml")))
    Server(load("tables.yaml")).check()
    for change, problem in (("model.name=nonesuch", "nonesuch"), ("model.metrics.auc=roc_auk", "no 'roc_auk'")):
        code, output = hansa("serve", "tables.yaml", "--insecure", "--set", change)
        assert (code, problem in output) == (2, True), output
    code, output = hansa("serve", "tables.yaml", "--insecure", "--set", "data.folder=no-such-folder")
    assert (code, "no-such-folder" in output) == (2, True), output


def test_the_status_of_running_servers_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(flower.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(flower.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "hansa-serve-killed.json").write_text("{}")
    assert hansa("serve", "--status") == (0, "no server is running\n")
    status = {"address": "0.0.0.0:8443", "sites": {"north": "at work"}, "run": "runs/first", "round": 3, "rounds": 9}
    with flower._StatusFile() as file:
        assert len(list(tmp_path.iterdir())) == 1, "that of a killed server is removed"
        file.write({**status, "process": 7, "before": "a longer state"})
        file.write({**status, "process": 7})
        code, output = hansa("serve", "--status")
    assert (code, "runs/first, round 3 of 9" in output, "north: at work" in output) == (0, True, True)
    assert hansa("serve")[0] == 2


def test_several_configurations_end_in_a_table_and_a_page(sites):
    arguments = ["--rounds", "1", "-o", "runs", "--report", "page.html", "--quiet"]
    output = run_well("serve", "a.yaml", "b.yaml", "--insecure", *arguments).output
    assert "report:" in output
    assert "other" in Path("page.html").read_text(encoding="utf-8")


def test_a_lost_memory_is_told_and_only_forgotten_on_request(sites):
    arguments = ["b.yaml", "--insecure", "-o", "run", "--quiet", "--set", "sample=null"]
    assert hansa("serve", *arguments, "--rounds", "2")[0] == 0
    sites.kill("north")
    shutil.rmtree("sites/north")
    assert hansa("serve", *arguments, "--rounds", "3", "--resume")[0] == 0
    assert RunFolder("run").history[-1]["reasons"] == {"memory": 3}
    forget = [word for client in range(3) for word in ("--forget", str(client))]
    assert hansa("serve", *arguments, "--rounds", "4", "--resume", *forget)[0] == 0
    assert RunFolder("run").history[-1]["participants"] == 6


def test_keys_or_the_wish_to_do_without_are_asked_for(sites):
    code, output = hansa("serve", "a.yaml")
    assert (code, "--keys FOLDER" in output) == (2, True)
    code, output = hansa("join", "--site", "north", "--data", "config", "--insecure", "--keys", "keys")
    assert (code, "not both" in output) == (2, True)


def test_other_places_are_refused(sites):
    Path("b.yaml").write_text(TEXT.replace("south: 3", "east: 3"))
    code, output = hansa("serve", "a.yaml", "b.yaml", "--insecure")
    assert (code, "different engine.sites" in output) == (2, True)


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
