"""``hansa serve``, ``join``, ``keys`` and ``replay``: a federation of sites."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, say
from hansa.cli.run import run_and_show
from hansa.cli.show import print_and_write, read_entries
from hansa.core.errors import HansaError

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.federation import certificates
    from hansa.federation.flower import SuperLink
    from hansa.federation.site import Agent, DataSource
    from hansa.runs.experiment import Experiment

CONNECTION = "Connection"
MAX_LOST = 20  # lines about lost updates
INSECURE = (
    "no TLS and no keys: anyone who can reach the port can read and change all messages and impersonate any site. Use "
    "this only for tests on one machine."
)
Keys = Annotated[Path | None, opt.option(CONNECTION, "--keys", help="Folder of keys, made by `hansa keys`.")]
Insecure = Annotated[bool, opt.option(CONNECTION, "--insecure", help="Use no TLS and no keys; for local tests only.")]


@opt.needs_code
def serve(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CONFIG...", help="Configuration files with engine: {kind: flower, sites: ...}."),
    ] = None,
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
    accept: opt.Accept = None,
    forget: Annotated[
        list[int] | None,
        opt.output("--forget", metavar="CLIENT", help="Reset a client whose site lost its memory. Repeatable."),
    ] = None,
    report: opt.Report = Path("report.html"),
    status: Annotated[
        bool, opt.option(CONNECTION, "--status", help="Show the servers of this user that are running, and exit.")
    ] = False,
    verbose: Annotated[bool, opt.option(CONNECTION, "--verbose", help="Show the log of Flower's SuperLink.")] = False,
    trust: opt.Trust = False,
    track: opt.Track = None,
    quiet: opt.Quiet = False,
) -> None:
    """Run configurations as the server of a federation.

    Waits for the sites, then runs the configurations on their data, one after the other.
    """
    if status:
        _print_status()
        return
    if not configs:
        raise HansaError("serve: expected a configuration file, or --status.")
    from hansa.federation import flower
    from hansa.federation.server import Server, clients_by_site
    from hansa.runs.experiment import refuse_other_settings
    from hansa.runs.folder import RunFolder, slug
    from hansa.runs.trackers import check_trackers

    flower.require_posix()
    check_trackers(track or [])
    requested = [opt.read_config(path, None, opt.changes(sets, rounds=rounds)) for path in configs]
    sites = [clients_by_site(config.engine) for config in requested]
    if any(site_clients != sites[0] for site_clients in sites):
        raise HansaError("serve: the configurations have different engine.sites: expected the same for all.")
    server_keys = _check_keys(keys, insecure)
    home = Path("runs") if folder is None else folder
    several = len(requested) > 1
    paths = [home if folder is not None and not several else home / slug(config.title) for config in requested]
    for config, run_path in zip(requested, paths, strict=True):
        Server(config).check()
        if resume and RunFolder(run_path).exists:
            refuse_other_settings(run_path, RunFolder(run_path).config, config)
    with _exit_on_signals():
        link = flower.SuperLink(list(sites[0]), server_keys, host=host, port=port, verbose=verbose)
        try:
            for config, run_path in zip(requested, paths, strict=True):
                experiment = _open_experiment(config, link, run_path, folder is None, resume, rounds, accept or [])
                experiment.run.forget(*(forget or []))
                _execute(experiment, link, quiet, track)
            Server(requested[-1], link).finish()
        finally:
            link.close()
    if several:
        print_and_write(list(read_entries(paths)[0].values()), report, title="Runs of a federation compared")


def _execute(experiment: Experiment, link: SuperLink, quiet: bool, track: list[str] | None) -> None:
    """Execute a run, and print the last updates that were requested and lost; the summary lists all."""
    from hansa.study.session import opened_job

    link.describe(round=lambda: experiment.run.state.round)
    run_and_show(lambda: [opened_job(experiment)], quiet, track)
    path = experiment.folder / "summary.json"
    lost = json.loads(path.read_text(encoding="utf-8")).get("lost_updates") or []
    for update in lost[-MAX_LOST:]:
        note("lost: site {site}, client {client}, round {round}: {reason}".format(**update), "yellow")
    if len(lost) > MAX_LOST:
        note(f"and {len(lost) - MAX_LOST} before: lost_updates in {path}", "yellow")


def _open_experiment(
    config: Config, link: SuperLink, path: Path, numbered: bool, resume: bool, rounds: int | None, accept: list[str]
) -> Experiment:
    """Resume the run of a folder, or start a new one when the sites have joined."""
    from hansa.federation.server import Server
    from hansa.runs.folder import RunFolder

    server = Server(config, link)
    link.describe(run=str(path), rounds=config.rounds, round=0)
    if resume and RunFolder(path).exists:
        last_round = config.rounds if rounds is not None else max(config.rounds, RunFolder(path).config.rounds)
        return server.resume(path, rounds=last_round, accept=accept)
    note(f"waiting on {link.address} for {', '.join(server.sites)}")
    return server.new(path, "new" if numbered else "refuse")


@opt.needs_code
def join(
    site: Annotated[str, typer.Option("--site", help="Name of this site in the server's configuration.")],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Data of this site: a CSV file or a folder of them, one per client, encoded by the server's schema; "
            "MODULE:FUNCTION, a YAML file with a data section, or a data set. For tests, "
            "`config` uses this site's clients of the server's configuration.",
        ),
    ],
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the server.")] = "127.0.0.1:8443",
    policy: Annotated[
        Path | None, typer.Option("--policy", help="YAML file with the runs that this site accepts.")
    ] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder for client memory. By default sites/NAME.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="HTML file about this site: requests, replies, policy decisions."),
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for another run when the run is over.")] = False,
    trust: opt.Trust = False,
) -> None:
    """Join a federation as a site.

    Trains this site's clients when the server asks. Their data never leaves the site.
    """
    from hansa.federation.flower import SiteNode, require_posix
    from hansa.federation.policy import Policy
    from hansa.federation.site import Agent

    require_posix()
    source = data_source(data)
    rules = Policy() if policy is None else Policy.load(policy)
    site_keys = _check_keys(keys, insecure)
    node = SiteNode(site, address, site_keys, limit=rules.message)
    agent = Agent(site, source, Path("sites") / site if folder is None else folder, rules)
    show_exchanges(agent, page, len(agent.exchange_log.exchanges))

    def answer(request: bytes) -> bytes:
        shown = len(agent.exchange_log.exchanges)
        reply = agent.handle(request)
        show_exchanges(agent, page, shown)
        return reply

    note(f"site {site} joins {address}. Press Ctrl-C to leave.")
    with _exit_on_signals(0):
        try:
            node.run(answer, lambda: agent.over and not stay)
            note("the run is over: the server has no more work")
        finally:
            node.close()
            note(f"site {site} left after {agent.rounds} answers")


def show_exchanges(agent: Agent, page: Path | None, shown: int) -> None:
    """Print the exchanges of a site beyond the first ``shown`` ones, and write its page, if there is one."""
    for exchange in agent.exchange_log.exchanges[shown:]:
        note(exchange.describe(), "yellow" if exchange.refusal else None)
    if page is not None:
        text = agent.exchange_log.page(agent.site, agent.policy.model_dump(mode="json"))
        page.write_text(text, encoding="utf-8")


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
    from hansa.config import Document, build, import_path, load, validate
    from hansa.data.csv_folder import read_tables
    from hansa.federation.site import DataSource

    if value == "config":
        return DataSource(build.load_data, shared=True)
    if Path(value).is_dir() or Path(value).suffix.lower() == ".csv":
        return DataSource(build.load_data, tables=lambda schema: read_tables(value, schema))
    if import_path.is_import_path(value):
        section: Any = {"factory": value}
    elif Path(value).suffix in (".yaml", ".yml"):
        opt.check_trust(Path(value))
        section = load(value).data.model_dump(exclude_defaults=True)
    else:
        section = {"name": value}
    config = validate(Document({"data": section}, "--data"))
    return DataSource(lambda _: build.load_data(config))


def _print_status() -> None:
    """Print what the servers of this user are doing."""
    from hansa.federation.flower import running_statuses

    statuses = running_statuses()
    for status in statuses:
        progress = f"round {status.get('round', 0)} of {status.get('rounds', '?')}"
        say(f"{status['address']} (process {status['process']}): {status.get('run', '')}, {progress}")
        for site, state in status["sites"].items():
            say(f"  {site}: {state}")
    if not statuses:
        say("no server is running")


@contextmanager
def _exit_on_signals(code: int | None = None) -> Iterator[None]:
    """Exit cleanly on SIGTERM and SIGHUP, with the code of the signal; or also on SIGINT, with ``code``."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number if code is None else code)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    numbers += [] if code is None else [signal.SIGINT]
    with ExitStack() as stack:
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            stack.callback(signal.signal, number, signal.signal(number, leave))
        yield


def _check_keys(folder: Path | None, insecure: bool) -> certificates.Keys | None:
    """Return the keys of a folder, or None with a warning if --insecure is given instead."""
    from hansa.federation.certificates import Keys

    if (folder is None) != insecure:
        raise HansaError("expected --keys FOLDER (made by `hansa keys`) or --insecure, and not both.")
    if insecure:
        note(f"insecure: {INSECURE}", "yellow")
    return None if folder is None else Keys(folder)


@opt.needs_code
def replay(
    folder: Annotated[Path, typer.Argument(help="Run folder of the server.")],
    trust: opt.Trust = False,
) -> None:
    """Replay an asynchronous federation in simulation.

    The run folder records the order of the updates and the model versions that they started from. With the data of all
    sites on this machine, the replay is bit-identical. The exit code is 1 if it is not.
    """
    from hansa.federation.server import replay_run

    result = replay_run(folder, trust=trust)
    steps = result.run.state.round
    if result.exact:
        say(f"{folder}: {steps} server steps replayed, equal to the bit")
        return
    different = ", ".join(name for name, equal in result.equal.items() if not equal)
    say(f"{folder}: {steps} server steps replayed, {different} differ from the recorded run")
    raise typer.Exit(1)
