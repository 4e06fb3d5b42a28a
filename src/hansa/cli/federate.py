"""``hansa serve``, ``hansa join`` and ``hansa keys``: a federation of sites."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, report_errors
from hansa.cli.report import print_and_write, read_entries
from hansa.cli.run import run_and_summarize
from hansa.core.errors import HansaError

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.federation.agent import DataSource
    from hansa.federation.superlink import SuperLink
    from hansa.runs.experiment import Experiment

CONNECTION = "Connection"
INSECURE = (
    "no TLS and no keys: anyone who can reach the port can read and change all messages and impersonate any site. Use "
    "this only for tests on one machine."
)
Keys = Annotated[Path | None, opt.option(CONNECTION, "--keys", help="Folder of keys, made by `hansa keys`.")]
Insecure = Annotated[bool, opt.option(CONNECTION, "--insecure", help="Use no TLS and no keys; for local tests only.")]


@report_errors
@opt.needs_code
def serve(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="Configuration files with engine: {kind: flower, sites: ...}."),
    ],
    keys: Keys = None,
    insecure: Insecure = False,
    host: Annotated[str, opt.option(CONNECTION, help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, opt.option(CONNECTION, help="Port that sites connect to.", min=1, max=65535)] = 8443,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    folder: Annotated[
        Path | None,
        opt.output("--out", "-o", help="Run folder; with several configurations, the folder above them."),
    ] = None,
    resume: Annotated[bool, opt.output("--resume", help="Resume the run in --out if there is one.")] = False,
    forget: Annotated[
        list[int] | None,
        opt.output("--forget", metavar="CLIENT", help="Reset a client whose site lost its memory. Repeatable."),
    ] = None,
    report: opt.Report = Path("report.html"),
    trust: opt.Trust = False,
    track: opt.Track = None,
    quiet: opt.Quiet = False,
) -> None:
    """Run configurations as the server of a federation.

    Waits for the sites, then runs the configurations on their data, one after the other.
    """
    from hansa.federation.certificates import ServerKeys
    from hansa.federation.serve import clients_by_site
    from hansa.federation.superlink import SuperLink
    from hansa.runs.folder import slug
    from hansa.runs.trackers import check_trackers

    check_trackers(track or [])
    requested = [opt.read_config(path, None, opt.changes(sets, rounds)) for path in configs]
    sites = [clients_by_site(config.engine) for config in requested]
    if any(other != sites[0] for other in sites):
        raise HansaError("serve: the configurations have different engine.sites: expected the same for all.")
    key_folder = _check_keys(keys, insecure)
    server_keys = None if key_folder is None else ServerKeys(key_folder)
    home = Path("runs") if folder is None else folder
    several = len(requested) > 1
    places = [home if folder is not None and not several else home / slug(config.title) for config in requested]
    link = SuperLink(list(sites[0]), server_keys, host=host, port=port)
    try:
        for config, place in zip(requested, places, strict=True):
            experiment = _open_experiment(config, link, place, folder is None, resume, rounds)
            experiment.run.forget(*(forget or []))
            run_and_summarize(experiment, quiet, track or [])
    finally:
        link.close()
    if several:
        print_and_write(list(read_entries(places)[0].values()), report, title="Runs of a federation compared")


def _open_experiment(
    config: Config, link: SuperLink, place: Path, numbered: bool, resume: bool, rounds: int | None
) -> Experiment:
    """Resume the run of a folder, or start a new one when the sites have joined."""
    from hansa.federation.serve import Server
    from hansa.runs.folder import RunFolder

    server = Server(config, link)
    if resume and RunFolder(place).exists:
        return server.resume(place, rounds=rounds)
    note(f"waiting on {link.address} for {', '.join(server.sites)}")
    return server.new(place, numbered=numbered)


@report_errors
@opt.needs_code
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the server.")] = "127.0.0.1:8443",
    site: Annotated[str, typer.Option("--site", help="Name of this site in the server's configuration.")] = "",
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Data of this site: MODULE:FUNCTION, a YAML file with a data section, or a data set. For tests, "
            "`config` uses this site's clients of the server's configuration.",
        ),
    ] = "",
    policy: Annotated[
        Path | None, typer.Option("--policy", help="YAML file with the runs that this site accepts.")
    ] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder for client memory. By default sites/NAME.")
    ] = None,
    trust: opt.Trust = False,
) -> None:
    """Join a federation as a site.

    Trains this site's clients when the server asks. Their data never leaves the site.
    """
    from hansa.federation.agent import Agent
    from hansa.federation.certificates import SiteKeys
    from hansa.federation.policy import Policy
    from hansa.federation.supernode import SuperNode

    if not site or not data:
        raise HansaError("join: expected --site NAME and --data ...")
    rules = Policy() if policy is None else Policy.load(policy)
    key_folder = _check_keys(keys, insecure)
    site_keys = None if key_folder is None else SiteKeys(key_folder)
    agent = Agent(site, data_source(data), Path("sites") / site if folder is None else folder, rules)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    node = SuperNode(site, address, site_keys, agent.handle, limit=rules.message)
    note(f"site {site} joins {address}. Press Ctrl-C to leave.")
    printed: dict[str, int] = {}
    try:
        while not stop.wait(1.0):
            for reason, count in agent.refusals.counts.items():
                if printed.get(reason) != count:
                    printed[reason] = count
                    note(f"refused ({reason}, {count} so far): {agent.refusals.last[reason]}")
    finally:
        node.close()
    note(f"site {site} left after {agent.rounds} answers")


@report_errors
def keys(
    folder: Annotated[Path, typer.Argument(help="New folder for the keys.")],
    sites: Annotated[str, typer.Option("--sites", help="Names of the sites, separated by commas.")],
    hosts: Annotated[
        str, typer.Option("--hosts", help="Names and addresses of the server, separated by commas.")
    ] = "localhost,127.0.0.1",
) -> None:
    """Create the certificates and keys of a test federation.

    Makes one folder for the server and one to give to each site.
    """
    from hansa.federation import certificates

    names = [name.strip() for name in sites.split(",") if name.strip()]
    certificates.make_keys(folder, names, [host.strip() for host in hosts.split(",") if host.strip()])
    note(f"{folder}/server stays with the server. Give each site its own folder:")
    for name in names:
        note(f"  {folder}/{name}")
    note(f"{folder}/ca.key can sign more certificates: keep it away from the server and the sites.")


def data_source(value: str) -> DataSource:
    """Return the data source that ``--data`` describes."""
    from hansa.config import build, from_yaml, load
    from hansa.config.registry import import_path
    from hansa.config.yaml_text import dump
    from hansa.federation.agent import DataSource

    if value == "config":
        return DataSource(build.load_data, shared=True)
    if import_path.is_import_path(value):
        section: Any = {"factory": value}
    elif Path(value).suffix in (".yaml", ".yml"):
        opt.check_trust(Path(value))
        section = load(value).data.model_dump(exclude_defaults=True)
    else:
        section = {"name": value}
    config = from_yaml(dump({"data": section}), source="--data")
    return DataSource(lambda _: build.load_data(config))


def _check_keys(keys: Path | None, insecure: bool) -> Path | None:
    """Return the folder of keys, or None with a warning if --insecure is given instead."""
    if (keys is None) != insecure:
        raise HansaError("expected --keys FOLDER (made by `hansa keys`) or --insecure, and not both.")
    if insecure:
        note(f"insecure: {INSECURE}", "yellow")
    return keys
