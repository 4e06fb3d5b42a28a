"""A round: its messages, the three functions that process them, validation and faults."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.rounds.aggregation import ClosedRound, Outcome, RoundAggregation, ServerState
    from hansa.rounds.measures import diagnose
    from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder, in_client_order
    from hansa.rounds.round import OpenedRound, client_round, close_round, open_paced_round, open_round

__all__ = [
    "Broadcast",
    "ClosedRound",
    "DroppedClient",
    "OpenedRound",
    "Outcome",
    "Report",
    "RoundAggregation",
    "ServerState",
    "WorkOrder",
    "client_round",
    "close_round",
    "diagnose",
    "in_client_order",
    "open_paced_round",
    "open_round",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
