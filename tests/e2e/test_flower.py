"""Sites over a stock SuperLink, with TLS and keys: equal to the serial engine, killed or not. Some of these tests run
wherever Flower is installed; `make e2e` runs all."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import closing

import pytest
import torch

from e2e import kills
from e2e.kills import METHODS
from e2e.real_sites import TEXT, children, join, until
from hansa.config import allow_code, build, from_yaml
from hansa.engine import Serial
from hansa.runs.experiment import build_run

sys.path.append(os.path.dirname(__file__))  # where flower_mine is, which the configuration names

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("flwr") is None,
        reason="a federation over Flower is not exercised: flwr is not installed (pip install 'hansa[flower]')",
    ),
]
whole = pytest.mark.skipif(os.environ.get("HANSA_E2E") != "1", reason="exercised by make e2e")


def simulated(*words):
    config = from_yaml(TEXT, [*words, "engine=pool"])
    with allow_code():
        return build_run(config, build.load_data(config), engine=Serial).advance(config.rounds)


def same(vectors, records, expected):
    for name, vector in expected.state.vectors.items():
        assert torch.equal(vectors[name], vector), name
    for mine, theirs in zip(records, expected.history, strict=True):
        assert mine["clients"] == theirs["clients"]
        assert (mine["up_bytes"], mine["peer_bytes"]) == (theirs["up_bytes"], theirs["peer_bytes"])


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    from hansa.federation import certificates

    folder = tmp_path_factory.mktemp("trust") / "keys"
    certificates.make_keys(folder, ["north", "south"])
    return folder


@pytest.fixture(scope="module")
def link(keys, tmp_path_factory):
    """A SuperLink of this process whose bundle is hostile, and two sites that are processes of their own."""
    from hansa.federation import flower
    from hansa.federation.certificates import Keys

    folder = tmp_path_factory.mktemp("sites")
    project = flower.APP["pyproject.toml"].replace("hansa:none", "hostile:app")
    code = f"open({str(folder / 'canary')!r}, 'w').close()\nfrom flwr.clientapp import ClientApp\napp = ClientApp()\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flower, "APP", {"pyproject.toml": project, "hostile.py": code})
        made = flower.SuperLink(["north", "south"], Keys(keys / "server"))
    made.canary, sites = folder / "canary", []
    try:
        sites += [join(folder, site, made.address, "--keys", str(keys / site)) for site in ("north", "south")]
        yield made
    finally:
        for site in sites:
            assert not children(site.process.pid), "a site is one process"
            site.stop()
        made.close()


def federated(link, folder, *words, callbacks=()):
    from hansa.federation.server import Server

    experiment = Server(from_yaml(TEXT, words), link).new(folder)
    experiment.execute(list(callbacks))
    return experiment.run


def test_fedavg_over_tls_is_the_serial_run(link, tmp_path):
    words = [*METHODS["fedavg"], "rounds=2"]
    run = federated(link, tmp_path / "run", *words)
    same(run.state.vectors, run.history, simulated(*words))
    assert set(run.history[-1]["sites"]) == {"north", "south"}


def test_a_hostile_bundle_is_neither_fetched_nor_run(link, tmp_path):
    """The first promise. The sites above have pulled and answered messages of a run with code in its bundle."""
    federated(link, tmp_path / "run", "rounds=1")
    link._log.seek(0)
    said = link._log.read().decode()
    assert "Fleet.PushMessages" in said
    assert "GetFab" not in said
    assert not link.canary.exists()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("no certificate", r"ca\.crt: no such file"),
        ("no authority", "certificate of the authority cannot be read"),
        ("a passphrase", "without a passphrase"),
        ("another authority", "certificate is not accepted"),
        ("an unknown key", "does not know the key of this site"),
        ("no server", "cannot be reached: .*refused"),
        ("no port", "expected HOST:PORT"),
    ],
)
def test_a_site_that_cannot_join_says_why_at_once(what, reason, link, keys, tmp_path, monkeypatch):
    from cryptography.hazmat.primitives import serialization

    from hansa.core.errors import HansaError
    from hansa.federation import certificates, flower

    certificates.make_keys(tmp_path / "keys", ["north"])
    own, address = tmp_path / "keys" / "north", link.address
    (own / "ca.crt").write_bytes((keys / "north" / "ca.crt").read_bytes())
    if what == "no certificate":
        (own / "ca.crt").unlink()
    elif what == "no authority":
        (own / "ca.crt").write_text("nonsense")
    elif what == "a passphrase":
        pair = serialization.load_ssh_private_key((own / "node.key").read_bytes(), None)
        form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
        (own / "node.key").write_bytes(pair.private_bytes(serialization.Encoding.PEM, form, locked))
    elif what == "another authority":
        certificates.make_keys(tmp_path / "others", ["north"])
        (own / "ca.crt").write_bytes((tmp_path / "others" / "north" / "ca.crt").read_bytes())
    elif what == "no server":
        address = f"127.0.0.1:{flower.free_port()}"
    elif what == "no port":
        address = "fl.example.org"

    def tell(node, error):  # it would try again
        raise HansaError(flower.describe(error))

    monkeypatch.setattr(flower.SiteNode, "_tell", tell)

    def join() -> None:
        with closing(flower.SiteNode("north", address, certificates.Keys(own), limit=1000)) as node:
            node.run(lambda request: pytest.fail("it was asked"), lambda: False)

    with pytest.raises(HansaError, match=reason):
        join()


@whole
@pytest.mark.parametrize("name", METHODS)
def test_every_family_over_tls_is_the_serial_run(name, link, tmp_path):
    run = federated(link, tmp_path / "run", *METHODS[name])
    same(run.state.vectors, run.history, simulated(*METHODS[name]))
    if name == "cafga":
        ledger = run.history[-1]
        assert sum(site["peer_bytes"] for site in ledger["sites"].values()) == ledger["peer_bytes"] > 0


def test_killed_and_stopped_processes_cost_time_only(tmp_path, monkeypatch):
    """The short form of `make e2e`: a site, then the SuperLink are killed, the server is stopped for some seconds."""
    monkeypatch.setattr(kills.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    trial = kills.Trial(0, 0, 2)
    trial.outcome.strikes = [
        kills.Strike(0, 0.0, "site", "north", "kill", 0.0),
        kills.Strike(1, 0.0, "superlink", "north", "kill", 0.0),
        kills.Strike(1, 4.0, "server", "north", "stop", 3.0),
    ]
    outcome = trial.run()
    trial.compare()
    assert not outcome.problems
    assert all(strike.struck for strike in outcome.strikes)


@whole
def test_who_is_not_a_site_is_not_let_in(link, keys, tmp_path):
    """Another authority, a key that nobody registered, no keys at all: none of them is ever asked for anything."""
    from hansa.federation import certificates

    certificates.make_keys(tmp_path / "other", ["north", "south"])
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for name, source in (("ca.crt", keys), ("node.key", tmp_path / "other")):
        (stranger / name).write_bytes((source / "north" / name).read_bytes())
        (stranger / name).chmod(0o600)
    trust = {
        "authority": ["--keys", str(tmp_path / "other" / "north")],
        "unregistered": ["--keys", str(stranger)],
        "plain": ["--insecure"],
    }
    here = [join(tmp_path, "north", link.address, *words, called=name) for name, words in trust.items()]
    try:
        run = federated(link, tmp_path / "run", *METHODS["fedavg"])
        until(lambda: all(process.process.poll() is not None for process in here[:2]), 120, *here)
    finally:
        for process in here:
            process.stop()
    same(run.state.vectors, run.history, simulated(*METHODS["fedavg"]))
    assert [process.process.returncode for process in here[:2]] == [2, 2]
    for process, reason in zip(
        here, ("certificate is not accepted", "does not know the key", "cannot be reached"), strict=True
    ):
        assert reason in process.told
        assert "left after 0 answers" in process.told
    assert link.online() == {"north", "south"}


@whole
def test_a_site_that_claims_to_be_another_is_known_by_its_key(keys, tmp_path):
    from hansa.core.errors import HansaError
    from hansa.federation.certificates import Keys
    from hansa.federation.flower import SuperLink
    from hansa.federation.server import Server

    link = SuperLink(["north", "south"], Keys(keys / "server"))
    impostor = join(tmp_path, "south", link.address, "--keys", str(keys / "north"))
    try:
        with pytest.raises(HansaError, match="site north does not take part: site: the message is for another site"):
            Server(from_yaml(TEXT), link).enroll_sites()
        assert link.online() == {"north"}
    finally:
        impostor.stop()
        link.close()
