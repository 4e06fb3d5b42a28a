"""A site's log of messages: what was asked of it, what left it, and what its policy decided. It stays at the site."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
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
"""What a site sends, by the kind of message."""


class Exchange(NamedTuple):
    """A message and its answer: when, the kinds, the bytes, the seconds of work, the round, a refusal's detail,
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


class ExchangeLog:
    """Appends exchanges to a file of JSON lines, and makes a page of them.

    Args:
        path: The file; None keeps the exchanges in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.exchanges: list[Exchange] = []
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    self.exchanges.append(Exchange(*json.loads(line)))
                except (ValueError, TypeError):
                    continue  # the last line of a process that was killed

    def add(
        self,
        request: str,
        received: int,
        sent: str,
        sent_bytes: int,
        seconds: float,
        round: int | None,
        refusal: str = "",
        kept_back: str = "",
    ) -> None:
        """Add an exchange."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.exchanges.append(
            Exchange(now, request, received, sent, sent_bytes, round_seconds(seconds), round, refusal, kept_back)
        )
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.exchanges[-1]) + "\n")

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the number of messages and the bytes that left the site, by kind.

        >>> log = ExchangeLog()
        >>> log.add("orders", 1000, "reports", 400, 0.25, 1)
        >>> log.add("orders", 1000, "refused", 60, 0.0, 2, "steps: 9 steps, permitted 5")
        >>> log.totals()
        {'refused': (1, 60), 'reports': (1, 400)}
        """
        counts: Counter[str] = Counter(each.sent for each in self.exchanges)
        sent: Counter[str] = Counter()
        for each in self.exchanges:
            sent[each.sent] += each.sent_bytes
        return {kind: (counts[kind], sent[kind]) for kind in sorted(counts)}

    def page(self, site: str, policy: Mapping[str, Any], newest: int = 200) -> str:
        """Return an HTML page for the operator of the site."""
        left = [[SENT.get(kind, kind), f"{count:,}", f"{size:,}"] for kind, (count, size) in self.totals().items()]
        refused = Counter(each.refusal.partition(":")[0] for each in self.exchanges if each.refusal)
        rows = [
            [
                each.time, REQUESTED.get(each.request, each.request), "" if each.round is None else str(each.round + 1),
                f"{each.received_bytes:,}", SENT.get(each.sent, each.sent), f"{each.sent_bytes:,}",
                f"{each.seconds:.2f}", each.refusal or _decision(each),
            ]
            for each in reversed(self.exchanges[-newest:])
        ]  # fmt: skip
        codes = [[code, str(count)] for code, count in sorted(refused.items())]
        name = html.escape(site)
        return "\n".join(
            [
                '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="10">',
                f"<title>Site {name}</title><style>{_STYLE}</style><h1>Site {name}</h1>",
                f"<p>{len(self.exchanges):,} messages from the server. This page and the texts of refusals stay here; "
                "the server receives the code only.</p>",
                "<h2>What left this site</h2>", _table(["content", "messages", "bytes"], left),
                "<h2>Policy</h2>", _table(["setting", "value"], [[key, str(value)] for key, value in policy.items()]),
                "<h2>Refused</h2>", _table(["code", "messages"], codes),
                f"<h2>The last {len(rows)} messages</h2>",
                _table(["time (UTC)", "asked", "round", "bytes in", "sent", "bytes out", "seconds", "decision"], rows),
                "</html>",
            ]
        )  # fmt: skip


def _decision(exchange: Exchange) -> str:
    return f"permitted; kept back: {exchange.kept_back}" if exchange.kept_back else "permitted"


def round_seconds(seconds: float) -> float:
    """Return seconds in milliseconds' precision."""
    return int(seconds * 1000 + 0.5) / 1000


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


_STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}"
)
