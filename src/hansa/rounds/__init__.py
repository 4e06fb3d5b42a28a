"""What belongs to a round: messages that travel, the three functions over them, the door, faults."""

from hansa.rounds.messages import Lost, Order, Report, Upload
from hansa.rounds.protocol import Closed, Opened, Outcome, ServerState, client_round, close_round, open_round

__all__ = [
    "Closed",
    "Lost",
    "Opened",
    "Order",
    "Outcome",
    "Report",
    "ServerState",
    "Upload",
    "client_round",
    "close_round",
    "open_round",
]
