"""A round: the messages that travel, the three functions over them, validation and faults."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from hansa.rounds.aggregation import ClosedRound, Outcome, RoundAggregation, in_cohort_order
    from hansa.rounds.diagnostics import diagnose
    from hansa.rounds.messages import Broadcast, DroppedClient, Report, Upload, WorkOrder
    from hansa.rounds.round import OpenedRound, client_round, close_round, open_round
    from hansa.rounds.state import ServerState

__all__ = [
    "Broadcast",
    "ClosedRound",
    "DroppedClient",
    "OpenedRound",
    "Outcome",
    "Report",
    "RoundAggregation",
    "ServerState",
    "Upload",
    "WorkOrder",
    "client_round",
    "close_round",
    "diagnose",
    "in_cohort_order",
    "open_round",
]

HOMES = {
    "Broadcast": "hansa.rounds.messages",
    "ClosedRound": "hansa.rounds.aggregation",
    "DroppedClient": "hansa.rounds.messages",
    "OpenedRound": "hansa.rounds.round",
    "Outcome": "hansa.rounds.aggregation",
    "Report": "hansa.rounds.messages",
    "RoundAggregation": "hansa.rounds.aggregation",
    "ServerState": "hansa.rounds.state",
    "Upload": "hansa.rounds.messages",
    "WorkOrder": "hansa.rounds.messages",
    "client_round": "hansa.rounds.round",
    "close_round": "hansa.rounds.round",
    "diagnose": "hansa.rounds.diagnostics",
    "in_cohort_order": "hansa.rounds.aggregation",
    "open_round": "hansa.rounds.round",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, HOMES)
