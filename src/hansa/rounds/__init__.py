"""What belongs to a round: messages that travel, the three functions over them, the door, faults."""

from typing import TYPE_CHECKING

from hansa.later import later

if TYPE_CHECKING:
    from hansa.rounds.closing import Closed, Closing, Outcome, in_cohort_order
    from hansa.rounds.messages import Delivery, Lost, Order, Report, Upload
    from hansa.rounds.observation import observe
    from hansa.rounds.protocol import Opened, client_round, client_rounds, close_round, open_round
    from hansa.rounds.state import ServerState

__all__ = [
    "Closed",
    "Closing",
    "Delivery",
    "Lost",
    "Opened",
    "Order",
    "Outcome",
    "Report",
    "ServerState",
    "Upload",
    "client_round",
    "client_rounds",
    "close_round",
    "in_cohort_order",
    "observe",
    "open_round",
]

HOMES = {
    "Closed": "hansa.rounds.closing",
    "Closing": "hansa.rounds.closing",
    "Delivery": "hansa.rounds.messages",
    "Lost": "hansa.rounds.messages",
    "Opened": "hansa.rounds.protocol",
    "Order": "hansa.rounds.messages",
    "Outcome": "hansa.rounds.closing",
    "Report": "hansa.rounds.messages",
    "ServerState": "hansa.rounds.state",
    "Upload": "hansa.rounds.messages",
    "client_round": "hansa.rounds.protocol",
    "client_rounds": "hansa.rounds.protocol",
    "close_round": "hansa.rounds.protocol",
    "in_cohort_order": "hansa.rounds.closing",
    "observe": "hansa.rounds.observation",
    "open_round": "hansa.rounds.protocol",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, HOMES)
