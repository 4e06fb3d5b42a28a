"""A site's log of messages: what was asked of it, what left it, and what its policy decided. It stays at the site."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

REQUESTED = {
    "charge": "to join a run",
    "schema": "for a summary of its tables",
    "orders": "to train clients",
    "exam": "to evaluate the model",
    "over": "nothing: the run is over",
}
SENT = {
    "hello": "numbers of samples, digest of the model",
    "summary": "summary of tables, as the policy allows",
    "reports": "updates of clients",
    "marks": "sums over test rows, metrics as the policy allows",
    "refused": "a refusal: one code",
    "over": "an acknowledgement",
}
"""What is asked of a site and what it sends, by the kind of message."""


class Exchange(NamedTuple):
    """A message and its answer: when, what they are, the bytes, the seconds of work, the round, a refusal's detail,
    and what the answer keeps back by the policy."""

    time: str
    request: str
    received_bytes: int
    sent: str
    sent_bytes: int
    seconds: float
    round: int | None = None
    refusal: str = ""
    kept_back: str = ""

    def describe(self) -> str:
        """Return a line about the exchange.

        >>> Exchange("2026-01-01T00:00:00+00:00", "to train clients", 1000, "updates of clients", 400, 0.5).describe()
        'asked to train clients; sent updates of clients (400 bytes, 0.5 s)'
        """
        prefix = "" if self.round is None else f"round {self.round + 1}: "
        if self.refusal:
            return f"{prefix}refused, asked {self.request}: {self.refusal}"
        kept_back = f"; kept back: {self.kept_back}" if self.kept_back else ""
        size = f"{self.sent_bytes:,} bytes, {self.seconds:.1f} s"
        return f"{prefix}asked {self.request}; sent {self.sent} ({size}){kept_back}"


class ExchangeLog:
    """Appends exchanges to a file of JSON lines, and makes a page of them.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exchanges: list[Exchange] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            with suppress(ValueError, TypeError):  # the last line of a process that was killed
                self.exchanges.append(Exchange(*json.loads(line)))

    def add(self, exchange: Exchange) -> None:
        """Add an exchange."""
        self.exchanges.append(exchange)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(exchange) + "\n")

    def page(self, site: str, policy: Mapping[str, Any], newest: int = 200) -> str:
        """Return an HTML page for the operator of the site."""
        import pandas  # here: a site that writes no page needs none

        def table(rows: Any, **headings: str) -> str:
            frame = pandas.DataFrame(rows, columns=list(headings)).rename(columns=headings)
            with pandas.option_context("display.max_colwidth", None):
                return "<p>none</p>" if frame.empty else str(frame.to_html(index=False, border=0))

        refused = Counter(row.refusal.partition(":")[0] for row in self.exchanges if row.refusal)
        frame = pandas.DataFrame(self.exchanges, columns=Exchange._fields)
        left = frame.groupby("sent", as_index=False)["sent_bytes"].agg(["count", "sum"])
        last = [row._asdict() for row in reversed(self.exchanges[-newest:])]
        for row in last:
            row["round"] = "" if row["round"] is None else row["round"] + 1
            row["decision"] = row["refusal"] or "; kept back: ".join(filter(None, ["permitted", row["kept_back"]]))
        messages = table(
            last, time="time (UTC)", request="asked", round="round", received_bytes="bytes in", sent="sent",
            sent_bytes="bytes out", seconds="seconds", decision="decision",
        )  # fmt: skip
        name = html.escape(site)
        return f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="10">
<title>Site {name}</title><style>{_STYLE}</style><h1>Site {name}</h1>
<p>{len(self.exchanges):,} messages from the server. This page and the texts of refusals stay here; the server receives
the code only.</p>
<h2>What left this site</h2>{table(left, sent="content", count="messages", sum="bytes")}
<h2>Policy</h2>{table(policy.items(), setting="setting", value="value")}
<h2>Refused</h2>{table(sorted(refused.items()), code="code", messages="messages")}
<h2>The last {len(last)} messages</h2>{messages}</html>"""


_STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}"
)
