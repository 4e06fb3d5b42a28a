"""What belongs to a round: messages that travel, the three functions over them, the door, faults."""

from hansa.rounds.closing import Closed, Closing, Outcome, in_cohort_order
from hansa.rounds.messages import Delivery, Lost, Order, Report, Upload
from hansa.rounds.observation import observe
from hansa.rounds.protocol import Opened, client_round, close_round, open_round
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
    "close_round",
    "in_cohort_order",
    "observe",
    "open_round",
]
