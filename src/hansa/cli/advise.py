"""``hansa advise``: rank methods for given link speeds, optionally with pilot runs, and write a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hansa.cli import options as opt
from hansa.cli.console import note, out, plain_table, report_errors, say
from hansa.cli.report import ranking_table, write_report
from hansa.cli.run import run_entries
from hansa.core.errors import HansaError
from hansa.study.report.formats import format_bytes, format_duration

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.rounds.ledger import LinkModel
    from hansa.study.advice import NetworkProfile, TrainingOption

SETTING, LINKS, RANKING = "Setting", "Links", "Ranking"


@report_errors
@opt.needs_code
def advise(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Configuration file with data, model and clients. Without it, pass --parameters and --clients.",
            show_default=False,
        ),
    ] = None,
    parameters: Annotated[float | None, opt.option(SETTING, help="Parameters of the model, such as 11e6.")] = None,
    buffers: Annotated[
        int | None,
        opt.option(SETTING, help="Statistics of its BatchNorm layers. By default those of the model.", min=0),
    ] = None,
    clients: Annotated[int | None, opt.option(SETTING, help="Number of clients.", min=1)] = None,
    participants: Annotated[
        int | None, opt.option(SETTING, help="Clients in each round. By default a tenth.", min=1)
    ] = None,
    step: Annotated[float, opt.option(SETTING, help="Seconds of a local step.")] = 0.05,
    up: Annotated[float, opt.option(LINKS, help="Uplink of a client, bytes per second.")] = 1e6,
    down: Annotated[float, opt.option(LINKS, help="Downlink of a client, bytes per second.")] = 4e6,
    latency: Annotated[float, opt.option(LINKS, help="Latency of an exchange with the server, seconds.")] = 0.1,
    peer: Annotated[
        float | None,
        opt.option(LINKS, help="Links between clients, bytes per second. Without it, clients cannot communicate."),
    ] = None,
    peer_latency: Annotated[float, opt.option(LINKS, help="Latency of an exchange between clients, seconds.")] = 0.01,
    steps: Annotated[str, opt.option(RANKING, help="Numbers of local steps to consider.")] = "1,10,50",
    rounds: Annotated[int, opt.option(RANKING, help="Rounds that FedAMS needs with the fewest steps.", min=1)] = 500,
    max_bytes: Annotated[float | None, opt.option(RANKING, "--bytes", help="Budget of bytes with the server.")] = None,
    max_hours: Annotated[float | None, opt.option(RANKING, "--hours", help="Budget of hours.")] = None,
    top: Annotated[int, opt.option(RANKING, help="How many options to show and to pilot.", min=1)] = 8,
    pilot: Annotated[int, opt.option(RANKING, help="Train the best options for this many rounds and rank them.")] = 0,
    sets: opt.Sets = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for the results.")] = Path("advice"),
    trust: opt.Trust = False,
    quiet: opt.Quiet = False,
) -> None:
    """Rank methods for given link speeds.

    Predicts the bytes and the time of methods, compressors, topologies and numbers of local steps. Bytes are those of
    the packets (an expectation where compressed broadcasts are missed), and time is that of the links and the local
    steps. The number of rounds is an order from the papers, not a prediction: use --pilot to measure.
    """
    from hansa.rounds.ledger import LinkModel
    from hansa.study.advice import NetworkProfile, list_options, pareto_front, rank_options

    if max_bytes is not None and max_hours is not None:
        raise HansaError("--bytes and --hours: expected one of the two.")
    if pilot and config is None:
        raise HansaError("--pilot needs a configuration with data and model: hansa advise run.yaml --pilot 10.")
    base = None if config is None else opt.read_config(config, None, opt.changes(sets))
    links = LinkModel(up, down, latency, peer if peer is not None else float("inf"), peer_latency)
    count, population, sending, statistics = _setting(base, parameters, clients, participants, buffers)
    network = NetworkProfile(count, population, sending, links, step, peers=peer is not None, buffers=statistics)
    by = "hours" if max_hours is not None else "bytes"
    ranked = rank_options(list_options(network, _parse_steps(steps)), rounds, by)
    budget = max_hours if max_hours is not None else max_bytes
    fitting = [each for each in ranked if budget is None or getattr(each, by)(rounds) <= budget]
    best = _diverse(fitting or ranked, top)
    _show_options(network, best, rounds, by, bool(fitting))
    chosen = best[0]
    if base is not None and base.profile is not None:
        _show_paces(base, network, chosen.steps)
    if pilot and base is not None:
        winner = _run_pilots(best, base, pilot, links, folder, quiet)
        chosen = next(each for each in best if each.name == winner)
    _write_advice(folder, chosen, base, network, ranked, pareto_front(ranked, rounds), rounds)
    say(f"\nconfiguration: {folder / 'advised.yaml'} ({chosen.name})\nplot: {folder / 'front.svg'}")


def _setting(
    base: Config | None,
    parameters: float | None,
    clients: int | None,
    participants: int | None,
    buffers: int | None,
) -> tuple[int, int, int, int]:
    """Parameters, clients, participants and BatchNorm's statistics, from the options or else from the configuration."""
    if base is not None and (parameters is None or clients is None):
        from hansa.config import build
        from hansa.core.keys import Key

        data = build.load_data(base)
        clients = data.population if clients is None else clients
        if parameters is None:
            task = build.build_task(base, data)
            start = task.start(Key(base.seed), task.dtype)
            parameters = start["model"].numel()
            if buffers is None and "buffers" in start:
                buffers = start["buffers"].numel()
    if parameters is None or clients is None:
        raise HansaError("--parameters and --clients: expected both, or a configuration.")
    count = max(1, clients // 10) if participants is None else participants
    return int(parameters), clients, count, buffers or 0


def _show_paces(base: Config, network: NetworkProfile, steps: int) -> None:
    """Rank paces for the profile of a configuration; the event loop is simulated, nothing is trained."""
    from hansa.config.sections import PROFILE
    from hansa.study.pace_advice import rank_paces

    ranked = rank_paces(
        PROFILE.build(base.profile),
        clients=network.clients,
        participants=network.participants,
        steps=steps,
        parameters=network.parameters,
        seed=base.seed,
    )
    at_work = f"{network.participants} of {network.clients} clients at work"
    say(f"\npaces for the profile, {at_work}, {steps} steps a job:")
    headings = ("pace", "updates/h", "server steps/h", "staleness", "oldest", "utilisation", "wasted", "reached")
    table = plain_table(*headings, left=("pace",))
    for each in ranked:
        table.add_row(
            escape(repr(each.pace)),
            f"{each.updates_per_hour:.0f}",
            f"{each.steps_per_hour:.0f}",
            f"{each.staleness:.1f}",
            str(each.staleness_max),
            f"{100 * each.utilisation:.0f}%",
            f"{100 * each.wasted:.0f}%",
            f"{100 * each.reached:.0f}%",
        )
    out().print(table)
    note("ranked by updates per virtual hour, discounted by (1 + staleness)^-1/2: a rule of thumb, not a theorem")


def _parse_steps(text: str) -> list[int]:
    try:
        return sorted({int(number) for number in text.split(",") if number.strip()})
    except ValueError as error:
        raise HansaError(f"--steps {text}: expected integers separated by commas, such as 1,10,50.") from error


def _diverse(options: Sequence[TrainingOption], top: int) -> list[TrainingOption]:
    """The best options, at most two with the same method and compressor."""
    chosen: list[TrainingOption] = []
    for each in options:
        alike = [one for one in chosen if (one.method, one.compressor) == (each.method, each.compressor)]
        if len(alike) < 2 and len(chosen) < top:
            chosen.append(each)
    return chosen


def _show_options(network: NetworkProfile, best: Sequence[TrainingOption], rounds: int, by: str, fits: bool) -> None:
    headings = ("option", "up/round", "down/round", "time/round", "rounds", "server bits", "total time")
    table = plain_table(*headings, left=("option",))
    for place, each in enumerate(best):
        table.add_row(
            escape(each.name),
            format_bytes(each.up_bytes),
            format_bytes(each.down_bytes),
            format_duration(each.seconds),
            f"{rounds * each.rounds:.3g}",
            format_bytes(each.bytes(rounds)),
            format_duration(3600 * each.hours(rounds)),
            style="green" if place == 0 else None,
        )
    out().print(table)
    say(
        f"\n{network.parameters:,} parameters, {network.participants} of {network.clients} clients per round; ranked "
        f"by {by}. The rounds are orders of magnitude, relative to {rounds} for FedAMS."
        + ("" if fits else " Nothing fits the budget: these are the nearest.")
    )
    for why in dict.fromkeys(f"{each.method}: {each.why}" for each in best):
        say(why, "dim")


def _run_pilots(
    best: Sequence[TrainingOption], base: Config, rounds: int, links: LinkModel, folder: Path, quiet: bool
) -> str:
    """Train the best options for some rounds, print their ranking, and return the name of the first."""
    from hansa.study.report import rank

    configs = {each.name: _configure(each, base, links, rounds) for each in best}
    note(f"pilots: {len(configs)} runs of {rounds} rounds", "dim")
    entries = run_entries(configs, folder / "pilots", quiet)
    ranking = rank(entries)
    out().print(ranking_table(ranking, None, out()))
    write_report(entries, folder / "pilots.html", title=f"Pilots of {rounds} rounds")
    return ranking[0].entry.name


def _configure(chosen: TrainingOption, base: Config, links: LinkModel, rounds: int) -> Config:
    """The base configuration with the method, links and rounds of an option."""
    import yaml

    from hansa.config import from_yaml, to_yaml
    from hansa.study.recipes.recipe import merge_fragment

    document = yaml.safe_load(to_yaml(base))
    for section in ("algorithm", "gossip", "compress", "uplink", "downlink", "channels", "aggregate"):
        document.pop(section, None)
    document.get("local", {}).pop("epochs", None)
    document.get("server", {}).pop("optimizer", None)
    document.pop("sample", None)
    merge_fragment(document, chosen.document())
    document["rounds"] = rounds
    document["links"] = {
        name: value
        for name in type(links).__dataclass_fields__
        if (value := getattr(links, name)) not in (float("inf"), False)
    }
    return from_yaml(yaml.safe_dump(document), (), chosen.name)


def _write_advice(
    folder: Path,
    chosen: TrainingOption,
    base: Config | None,
    network: NetworkProfile,
    options: Sequence[TrainingOption],
    front: Sequence[TrainingOption],
    rounds: int,
) -> None:
    """Write the configuration of the chosen option and the plot of the Pareto front."""
    from hansa.config import from_yaml, to_yaml
    from hansa.runs.store.io import make_folder, write_file
    from hansa.study.report.pareto import CostPoint, pareto_svg

    if base is None:
        participation = network.participants / network.clients
        base = from_yaml(f"data: {{clients: {network.clients}}}\nsample: {{participation: {participation}}}")
    config = _configure(chosen, base, network.links, round(max(1, rounds * chosen.rounds)))
    comment = (
        f"# {chosen.name}: {chosen.why}\n# rounds are an order of magnitude; learning rates are defaults: tune them\n"
    )
    make_folder(folder.absolute())
    write_file(folder / "advised.yaml", (comment + to_yaml(config)).encode())
    points = [CostPoint(each.name, each.bytes(rounds), each.hours(rounds), each in front) for each in options]
    write_file(folder / "front.svg", pareto_svg(points).encode())
