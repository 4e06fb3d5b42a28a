"""The arguments of the presets, their defaults, and shared compositions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, wraps
from typing import Any, ParamSpec, TypedDict, Unpack, cast, get_args, get_type_hints

from hansa.aggregate import mean
from hansa.aggregate.base import Weights
from hansa.algorithm import Algorithm, Channel, LocalPhase
from hansa.compress import Compressor, Downlink, Uplink, direct, error_feedback, replica
from hansa.compress.base import require_compressor
from hansa.core.errors import HansaError, argument_error, invalid_argument, short_repr, suggestion
from hansa.core.protocols import missing_methods
from hansa.core.schedule import Rate
from hansa.core.types import MODEL
from hansa.local import Batches, LocalWork, Solver, as_batching, fixed, sgd
from hansa.local import epochs as local_epochs
from hansa.sample import Sampler, uniform
from hansa.server import ServerTransform, chain, scale

P = ParamSpec("P")


class Common(TypedDict, total=False):
    """The arguments of every preset.

    Args:
        local_lr: Learning rate of the clients, a number or a schedule.
        steps: Local steps per round: one number, one per client, or a component such as `hansa.local.drawn`.
        epochs: Passes over a client's data per round, instead of ``steps``.
        batch_size: Rows per batch; None takes all rows of the client.
        batches: The last batch of a pass "full", "short" or "drop"; "continued" passes across rounds; or a component.
        participation: Fraction of the clients that participate in a round.
        sampler: Component that selects the participants, instead of ``participation``.
        server_lr: Learning rate of the server, a number or a schedule.
        weights: Weights of the updates: "uniform", "samples", "clusters", or one number per client.
        local_momentum: Momentum of the local steps, starting from zero in every round.
        weight_decay: L2 penalty of the local steps.
        max_grad_norm: Clip local gradients to this norm; None does not clip.
        compressor: Compressor of the uploads, with error feedback; None sends them uncompressed.
        two_way: Compress the broadcasts too: True for the same compressor, or another compressor or a downlink.

    >>> sorted(Common.__annotations__)[:3]
    ['batch_size', 'batches', 'compressor']
    """

    local_lr: Rate
    steps: int | Sequence[int] | LocalWork
    epochs: float
    batch_size: int | None
    batches: Batches
    participation: float
    sampler: Sampler
    server_lr: Rate
    weights: Weights
    local_momentum: float
    weight_decay: float
    max_grad_norm: float | None
    compressor: Compressor
    two_way: bool | Compressor | Downlink


class Adaptive(Common, total=False):
    """The arguments of presets with an adaptive server.

    Args:
        b1: Decay rate of the first moment m.
        b2: Decay rate of the second moment v.
        eps: Term that bounds the denominator from below.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        v0: Initial value of v.

    >>> "eps" in Adaptive.__annotations__
    True
    """

    b1: float
    b2: float
    eps: float
    bias_correction: bool
    v0: float


class AdaptiveEps(Adaptive, total=False):
    """The arguments of presets whose adaptive server has ``eps_inside``.

    Args:
        eps_inside: Divide by sqrt(v + eps) instead of sqrt(v) + eps.

    >>> "eps_inside" in AdaptiveEps.__annotations__
    True
    """

    eps_inside: bool


COMMON_DEFAULTS: dict[str, Any] = {
    "local_lr": 0.05, "steps": None, "epochs": 1, "batch_size": 32, "batches": "full", "participation": 1.0,
    "sampler": None, "server_lr": 1.0, "weights": "uniform", "local_momentum": 0.0, "weight_decay": 0.0,
    "max_grad_norm": None, "compressor": None, "two_way": False,
}  # fmt: skip
EXCLUSIVE = (("steps", "epochs"), ("sampler", "participation"), ("participation", "reporters"))


def preset(
    server: type | None = None, /, **defaults: Any
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Decorate a preset so that its signature and docstring list every argument of its `TypedDict` with its default.

    Args:
        server: Server transform whose fields are among the arguments, with its defaults.
        **defaults: Defaults that differ in this preset; None marks an argument that is unset by default.
    """

    def decorate(function: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        server_defaults = {field.name: field.default for field in fields(server)} if server is not None else {}
        hints = get_type_hints(function)
        *parameters, options = inspect.signature(function).parameters.values()
        (typed_dict,) = get_args(hints[options.name])
        all_defaults = {**COMMON_DEFAULTS, **server_defaults, **defaults}
        expanded = [
            *(parameter.replace(annotation=hints[parameter.name]) for parameter in parameters),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=all_defaults[name], annotation=hint)
                for name, hint in _hints_of(typed_dict).items()
            ),
        ]
        names = _hints_of(typed_dict).keys()
        values = {name: value for name, value in all_defaults.items() if value is not None and name in names}
        signature = inspect.Signature(expanded, return_annotation=Algorithm)

        @wraps(function)
        def build(*args: P.args, **arguments: P.kwargs) -> Algorithm:
            _check_arguments(function.__name__, arguments, signature.parameters)
            replaced = {first for first, second in EXCLUSIVE if arguments.get(second) is not None}
            used = {name: value for name, value in values.items() if name not in replaced}
            return function(*args, **cast("Any", {**used, **arguments}))

        build.__signature__ = signature  # type: ignore[attr-defined]
        build.__doc__ = _expanded_doc(function.__doc__, f"**{options.name}:", typed_dict)
        return build

    return decorate


@cache
def _hints_of(typed_dict: Any) -> dict[str, Any]:
    return get_type_hints(typed_dict)


def _expanded_doc(doc: str | None, marker: str, typed_dict: Any) -> str | None:
    """Return the docstring of a preset with its ``**options`` line replaced by one line per argument."""
    lines = (doc or "").splitlines()
    options_line = next((number for number, line in enumerate(lines) if line.strip().startswith(marker)), None)
    if options_line is None:
        return doc
    listed = [f"        {name}: {text}" for name, text in ARGUMENT_DOCS.items() if name in _hints_of(typed_dict)]
    return "\n".join([*lines[:options_line], *listed, *lines[options_line + 1 :]])


ARGUMENT_DOCS: dict[str, str] = {}
"""One line for each argument of the presets' typed dictionaries, from their docstrings."""


def document_arguments(*typed_dicts: Any) -> None:
    """Collect the ``Args`` of typed dictionaries, for the docstrings of presets."""
    for typed_dict in typed_dicts:
        for line in (typed_dict.__doc__ or "").splitlines():
            name, colon, text = line.strip().partition(": ")
            if colon and name in typed_dict.__annotations__:
                ARGUMENT_DOCS[name] = text


document_arguments(Common, Adaptive, AdaptiveEps)


def _check_arguments(name: str, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    for argument, value in arguments.items():
        if argument not in parameters:
            raise argument_error(name, argument, value, f"no such argument. {suggestion(argument, parameters)}")
    for first, second in EXCLUSIVE:
        if arguments.get(first) is not None and arguments.get(second) is not None:
            values = f"{first}={short_repr(arguments[first])}, {second}={short_repr(arguments[second])}"
            message = f"{name}({values}): expected one of the two."
            raise HansaError(message, component=name, argument=first, value=arguments[first])


def compose(
    name: str, *, solver: Solver | None = None, channels: Mapping[str, Channel] | None = None, **common: Unpack[Common]
) -> Algorithm:
    """Return FedAvg with the given arguments, under another name; other channels get the links of the model's."""
    downlink, uplink = _links(name, common)
    model = Channel(downlink, uplink, mean(common["weights"]), scale(common["server_lr"]))
    others = {key: replace(channel, downlink=downlink, uplink=uplink) for key, channel in (channels or {}).items()}
    local = LocalPhase(
        solver=sgd() if solver is None else solver,
        steps=local_work(common),
        lr=common["local_lr"],
        batch_size=common["batch_size"],
        batches=as_batching(common.get("batches", "full"), name),
        momentum=common["local_momentum"],
        weight_decay=common["weight_decay"],
        max_grad_norm=common.get("max_grad_norm"),
    )
    return Algorithm(name, select_sampler(common), local, {MODEL: model, **others})


def compose_adaptive(
    name: str, server: Callable[..., ServerTransform], arguments: Mapping[str, Any], **components: Any
) -> Algorithm:
    """Return FedAvg with an adaptive server in front of the server's learning rate."""
    server_fields = {field.name for field in fields(cast("Any", server))}
    common: Any = {argument: value for argument, value in arguments.items() if argument not in server_fields}
    transform = server(**{argument: value for argument, value in arguments.items() if argument in server_fields})
    return compose(name, **common, **components).with_server(with_lr(transform, common))


def with_lr(server: ServerTransform, common: Common) -> ServerTransform:
    """Return a server transform followed by the server's learning rate."""
    return chain(server, scale(common["server_lr"]))


def select_sampler(common: Common) -> Sampler:
    """Return the sampler, by default uniform with the given participation."""
    return common["sampler"] if common.get("sampler") is not None else uniform(common["participation"])


def local_work(common: Common) -> LocalWork:
    """Return the amount of local work: ``steps``, or else ``epochs``."""
    steps = common.get("steps")
    if steps is None:
        return local_epochs(common["epochs"])
    return fixed(steps) if isinstance(steps, (int, Sequence)) else steps


def _links(name: str, common: Common) -> tuple[Downlink, Uplink]:
    """Return the links: direct, or error feedback with a compressor and, with ``two_way``, a compressed replica."""
    compressor, two_way = common.get("compressor"), cast("Any", common.get("two_way", False))
    if compressor is None:
        if two_way:
            raise invalid_argument(name, "two_way", True, "a compressor with it", "compressor=hansa.compress.sign().")
        return direct(), direct()
    require_compressor(name, "compressor", compressor)
    if isinstance(two_way, bool):
        return replica(compressor) if two_way else direct(), error_feedback(compressor)
    return two_way if missing_methods(two_way, Compressor) else replica(two_way), error_feedback(compressor)
