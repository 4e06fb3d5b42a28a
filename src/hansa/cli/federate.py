"""``hansa serve``, ``hansa join`` and ``hansa keys``: a federation of real sites."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli.console import err, guarded
from hansa.cli.run import Quiet, Rounds, Sets, Track, carry_out, changes, read_config

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.federation.agent import Source
    from hansa.federation.superlink import SuperLink
    from hansa.runs.experiment import Experiment

INSECURE = (
    "without TLS and without keys: whoever reaches the port can read and change everything that travels, and claim to "
    "be any site. For trials on this machine only."
)
Keys = Annotated[Path | None, typer.Option("--keys", help="The folder of keys, as `hansa keys` makes them.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: trials on this machine only.")]


@guarded
def serve(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG...", help="YAML files with engine: {kind: flower, sites: ...}.")
    ],
    keys: Keys = None,
    insecure: Insecure = False,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 listens on all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port that sites connect to.", min=1, max=65535)] = 8443,
    sets: Sets = None,
    rounds: Rounds = None,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder, or of several runs the one above theirs.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out, if there is one.")] = False,
    forget: Annotated[
        list[int] | None,
        typer.Option("--forget", metavar="CLIENT", help="Let a client whose site lost its memory begin anew."),
    ] = None,
    report: Annotated[Path, typer.Option("--report", help="Of several runs: the page of curves.")] = Path(
        "report.html"
    ),
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Be the server of a federation: wait for the sites, then run the configurations on their data, one by one."""
    from hansa.cli.compare import readable, show
    from hansa.core.errors import HansaError
    from hansa.federation.certificates import ServerKeys
    from hansa.federation.serve import placed
    from hansa.federation.superlink import SuperLink
    from hansa.runs.folder import slug
    from hansa.runs.trackers import check

    check(track or [])
    asked = [read_config(path, None, changes(sets, rounds)) for path in configs]
    sites = [placed(config.engine) for config in asked]
    if any(other != sites[0] for other in sites):
        raise HansaError("serve: the configurations have different engine.sites: expected the same federation for all.")
    held = None if _chosen(keys, insecure) is None else ServerKeys(Path(str(keys)))
    home = Path("runs") if folder is None else folder
    several = len(asked) > 1
    where = [home if folder is not None and not several else home / slug(config.title) for config in asked]
    link = SuperLink(list(sites[0]), held, host=host, port=port)
    try:
        for config, place in zip(asked, where, strict=True):
            experiment = _begun(config, link, place, folder is None, resume, rounds)
            experiment.run.forget(*(forget or []))
            carry_out(experiment, quiet, track or [])
    finally:
        link.close()
    if several:
        show(list(readable(where)[0].values()), report, title="Runs of a federation compared")


def _begun(
    config: Config, link: SuperLink, place: Path, numbered: bool, resume: bool, rounds: int | None
) -> Experiment:
    """The run of a configuration, new or taken up."""
    from hansa.federation.serve import Server
    from hansa.runs.folder import RunFolder

    server = Server(config, link)
    if resume and RunFolder(place).exists:
        return server.resumed(place, rounds=rounds)
    err().print(f"waiting on {link.address} for {', '.join(server.sites)}", markup=False, soft_wrap=True)
    return server.new(place, numbered=numbered)


@guarded
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of the server.")] = "127.0.0.1:8443",
    site: Annotated[str, typer.Option("--site", help="This site, as the server's configuration calls it.")] = "",
    held: Annotated[
        str,
        typer.Option(
            "--data",
            help="This site's data: MODULE:FUNCTION, a YAML file with a data section, or the name of a data set; "
            "`config` takes this site's clients of the configuration's own data, on trials.",
        ),
    ] = "",
    policy: Annotated[Path | None, typer.Option("--policy", help="A YAML file: what this site takes part in.")] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where the clients' memory is kept; by default sites/NAME.")
    ] = None,
) -> None:
    """Be a site of a federation: train this site's clients when the server asks; their data never leaves."""
    from hansa.core.errors import HansaError
    from hansa.federation.agent import Agent
    from hansa.federation.certificates import SiteKeys
    from hansa.federation.policy import Policy
    from hansa.federation.supernode import SuperNode

    if not site or not held:
        raise HansaError("join: expected --site NAME and --data ...")
    rules = Policy() if policy is None else Policy.load(policy)
    own = None if _chosen(keys, insecure) is None else SiteKeys(Path(str(keys)))
    agent = Agent(site, source(held), Path("sites") / site if folder is None else folder, rules)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    node = SuperNode(site, address, own, agent.handle, limit=rules.message)
    err().print(f"site {site} joins {address}; Ctrl-C leaves", markup=False, soft_wrap=True)
    told: dict[str, int] = {}
    try:
        while not over.wait(1.0):
            for reason, count in agent.refusals.counts.items():
                if told.get(reason) != count:
                    told[reason] = count
                    text = f"refused ({reason}, {count} so far): {agent.refusals.last[reason]}"
                    err().print(text, markup=False, soft_wrap=True)
    finally:
        node.close()
    err().print(f"site {site} has left after {agent.rounds} answers", markup=False, soft_wrap=True)


@guarded
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder for the keys.")],
    sites: Annotated[str, typer.Option("--sites", help="Names of the sites, with commas between.")],
    hosts: Annotated[
        str, typer.Option("--hosts", help="Names and addresses by which sites reach the server, with commas between.")
    ] = "localhost,127.0.0.1",
) -> None:
    """Make the certificates and keys of a trial federation: one folder for the server, one to hand to each site."""
    from hansa.federation import certificates

    names = [name.strip() for name in sites.split(",") if name.strip()]
    certificates.make(folder, names, [host.strip() for host in hosts.split(",") if host.strip()])
    err().print(f"{folder}/server stays with the server; hand each site its own folder:", markup=False)
    for name in names:
        err().print(f"  {folder}/{name}", markup=False)
    err().print(f"{folder}/ca.key can make more certificates: keep it away from both.", markup=False, soft_wrap=True)


def source(said: str) -> Source:
    """Where a site's data comes from, as the command line says it."""
    from hansa.config import build, from_text, load
    from hansa.config.registry import import_path
    from hansa.federation.agent import Source

    if said == "config":
        return Source(build.federated, shared=True)
    if import_path.is_place(said):
        section: Any = {"factory": said}
    elif Path(said).suffix in (".yaml", ".yml"):
        section = load(said).data.model_dump(exclude_defaults=True)
    else:
        section = {"name": said}
    from hansa.config.yaml_text import dump

    own = from_text(dump({"data": section}), source="--data")
    return Source(lambda config: build.federated(own))


def _chosen(keys: Path | None, insecure: bool) -> Path | None:
    """Keys, or the explicit wish to do without."""
    from hansa.core.errors import HansaError

    if (keys is None) != insecure:
        raise HansaError("expected --keys FOLDER (`hansa keys` makes one), or --insecure, and not both.")
    if insecure:
        err().print(f"insecure: {INSECURE}", style="yellow", markup=False, soft_wrap=True)
    return keys
