"""``hansa advise``: what a network bears, ranked; pilots on request; a configuration and a plot to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli.console import err, guarded, out
from hansa.cli.run import Quiet, Sets, changes, read_config

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.study.advice import Network, Option
    from hansa.study.report import Entry


@guarded
def advise(
    config: Annotated[
        Path | None,
        typer.Argument(help="A YAML file with data, model and clients; without it --parameters and --clients say."),
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Of the model, such as 11e6.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many there are.", min=1)] = None,
    participants: Annotated[int | None, typer.Option(help="How many take part in a round.", min=1)] = None,
    up: Annotated[float, typer.Option(help="From a client to the server, bytes a second.")] = 1e6,
    down: Annotated[float, typer.Option(help="From the server to a client, bytes a second.")] = 4e6,
    latency: Annotated[float, typer.Option(help="Of an exchange with the server, seconds.")] = 0.1,
    peer: Annotated[
        float | None, typer.Option(help="Between clients, bytes a second; left out, clients cannot talk.")
    ] = None,
    peer_latency: Annotated[float, typer.Option(help="Of an exchange between clients, seconds.")] = 0.01,
    step: Annotated[float, typer.Option(help="Seconds of a local step.")] = 0.05,
    steps: Annotated[str, typer.Option(help="Numbers of local steps to weigh.")] = "1,10,50",
    rounds: Annotated[int, typer.Option(help="That FedAMS is thought to need with the fewest steps.", min=1)] = 500,
    most_bytes: Annotated[float | None, typer.Option("--bytes", help="A budget of bytes with the server.")] = None,
    most_hours: Annotated[float | None, typer.Option("--hours", help="A budget of hours.")] = None,
    pilot: Annotated[int, typer.Option(help="Train the best few for so many rounds each, and rank what came out.")] = 0,
    top: Annotated[int, typer.Option(help="How many to show, and to pilot.", min=1)] = 8,
    sets: Sets = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the advice goes.")] = Path("advice"),
    quiet: Quiet = False,
) -> None:
    """Rank methods, compressors, topologies and local steps by what they would send and how long they would take.

    Bytes are exact, time is that of the links and the steps; rounds are orders that the papers prove, not predictions
    of yours: a pilot measures them.
    """
    from hansa.core.errors import HansaError
    from hansa.rounds.ledger import LinkModel
    from hansa.study.advice import Network, front, options, ranked

    if most_bytes is not None and most_hours is not None:
        raise HansaError("--bytes and --hours: expected one of the two.")
    if pilot and config is None:
        raise HansaError("--pilot needs a configuration with data and model: hansa advise run.yaml --pilot 10.")
    base = None if config is None else read_config(config, None, changes(sets, None, None, None, None))
    given = _given(base, parameters, clients, participants)
    links = LinkModel(up, down, latency, peer if peer is not None else float("inf"), peer_latency)
    network = Network(*given, links, step, peers=peer is not None)
    by = "hours" if most_hours is not None else "bytes"
    found = ranked(options(network, _numbers(steps)), rounds, by)
    fits = [option for option in found if _fits(option, rounds, most_bytes, most_hours)]
    best = _varied(fits or found, top)
    _show(network, best, rounds, by, fits, most_bytes, most_hours)
    entries = _piloted(best, base, pilot, links, folder, quiet) if pilot and base is not None else []
    chosen = best[0] if not entries else next(option for option in best if option.name == entries[0].name)
    _write(folder, chosen, base, links, network, found, front(found, rounds), rounds)
    told = f"\nconfiguration: {folder / 'advised.yaml'} ({chosen.name})\nplot: {folder / 'front.svg'}"
    out().print(told, markup=False, soft_wrap=True)


def _given(
    base: Config | None, parameters: float | None, clients: int | None, participants: int | None
) -> tuple[int, int, int]:
    """Parameters, clients and participants, from options first, else from the configuration."""
    from hansa.core.errors import HansaError

    if base is not None and (parameters is None or clients is None):
        from hansa.config import build

        federated = build.federated(base)
        clients = federated.population if clients is None else clients
        if parameters is None:
            from hansa.core.keys import Key

            task = build.task(base, federated)
            parameters = task.start(Key(base.seed), task.dtype)["model"].numel()
    if parameters is None or clients is None:
        raise HansaError("--parameters and --clients: expected both, or a configuration that says.")
    if participants is None:
        participants = max(1, clients // 10)
    return int(parameters), clients, participants


def _numbers(text: str) -> list[int]:
    from hansa.core.errors import HansaError

    try:
        return sorted({int(word) for word in text.split(",") if word.strip()})
    except ValueError as error:
        raise HansaError(
            f"--steps {text}: expected whole numbers with commas between them, such as 1,10,50."
        ) from error


def _fits(option: Option, rounds: int, most_bytes: float | None, most_hours: float | None) -> bool:
    if most_bytes is not None:
        return option.bytes(rounds) <= most_bytes
    return most_hours is None or option.hours(rounds) <= most_hours


def _varied(found: Sequence[Option], top: int) -> list[Option]:
    """The best, at most two of a method and its compressor: what differs in little says little."""
    kept: list[Option] = []
    for option in found:
        alike = [one for one in kept if (one.method, one.compressor) == (option.method, option.compressor)]
        if len(alike) < 2 and len(kept) < top:
            kept.append(option)
    return kept


def _show(
    network: Network,
    best: Sequence[Option],
    rounds: int,
    by: str,
    fits: Sequence[Option],
    most_bytes: float | None,
    most_hours: float | None,
) -> None:
    from hansa.study.report import formats

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("option", "up a round", "down a round", "time a round", "rounds", "with the server", "in all"):
        table.add_column(heading, justify="left" if heading == "option" else "right")
    for place, option in enumerate(best):
        table.add_row(
            escape(option.name),
            formats.bits(8 * option.up_bytes),
            formats.bits(8 * option.down_bytes),
            formats.duration(option.seconds),
            f"{rounds * option.rounds:.3g}",
            formats.bits(8 * option.bytes(rounds)),
            formats.duration(3600 * option.hours(rounds)),
            style="green" if place == 0 else None,
        )
    out().print(table)
    told = (
        f"\n{network.parameters:,} parameters, {network.participants} of {network.clients} clients a round; ranked by "
        f"{by}. Rounds are orders, with {rounds} for FedAMS."
    )
    if (most_bytes is not None or most_hours is not None) and not fits:
        told += " Nothing fits the budget: these come nearest."
    out().print(told, markup=False, soft_wrap=True)
    for why in dict.fromkeys(f"{option.method}: {option.why}" for option in best):
        out().print(why, markup=False, soft_wrap=True, style="dim")


def _piloted(best: Sequence[Option], base: Config, pilot: int, links: Any, folder: Path, quiet: bool) -> list[Entry]:
    """The best few, trained for some rounds on the data: a table and a page, best first."""
    from hansa.cli.compare import ranked_table, write_page
    from hansa.cli.run_batch import entries_of
    from hansa.study import report

    configs = {option.name: _configured(option, base, links, pilot) for option in best}
    err().print(f"pilots: {len(configs)} of {pilot} rounds each", style="dim")
    entries = entries_of(configs, folder / "pilots", quiet)
    standings = report.rank(entries)
    out().print(ranked_table(standings, None, out()))
    write_page(entries, folder / "pilots.html", title=f"Pilots of {pilot} rounds")
    return [standing.entry for standing in standings]


def _configured(option: Option, base: Config, links: Any, rounds: int) -> Config:
    """A configuration with the option's words laid over it."""
    import yaml

    from hansa.config import from_text, to_text
    from hansa.study.recipes.recipe import put

    document = yaml.safe_load(to_text(base))
    for section in ("algorithm", "gossip", "compress", "uplink", "downlink", "channels", "aggregate"):
        document.pop(section, None)
    document.get("local", {}).pop("epochs", None)
    document.get("server", {}).pop("chain", None)
    if option.topology:
        document.pop("sample", None)
    put(document, option.document())
    document["rounds"] = rounds
    document["links"] = {
        name: value
        for name in type(links).__dataclass_fields__
        if (value := getattr(links, name)) not in (float("inf"), False)
    }
    return from_text(yaml.safe_dump(document), (), option.name)


def _write(
    folder: Path,
    chosen: Option,
    base: Config | None,
    links: Any,
    network: Network,
    found: Sequence[Option],
    best: Sequence[Option],
    rounds: int,
) -> None:
    from hansa.config import from_text, to_text
    from hansa.runs.store.io import make_folder, write_file
    from hansa.study.report.pareto import Point, svg

    started = base
    if started is None:
        clients, share = network.clients, network.participants / network.clients
        started = from_text(f"data: {{clients: {clients}}}\nsample: {{participation: {share}}}")
    config = _configured(chosen, started, links, round(max(1, rounds * chosen.rounds)))
    make_folder(folder.absolute())
    told = f"# {chosen.name}: {chosen.why}\n# rounds are an order, not a promise; rates are defaults: sweep them\n"
    write_file(folder / "advised.yaml", (told + to_text(config)).encode())
    points = [Point(o.name, o.bytes(rounds), o.hours(rounds), o in best) for o in found]
    write_file(folder / "front.svg", svg(points).encode())
