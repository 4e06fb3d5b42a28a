"""Why a site refuses a message or leaves out a client: all that it says of an error.

A site sends one of these codes, and for a table that does not fit one of the schema's codes with a column of the
schema. The text of an error, with its paths, values and names, stays in the site's own log. The server prints its own
text of the code.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable

from hansa.core.errors import HansaError
from hansa.data import DataError
from hansa.rounds.messages import DroppedClient

log = logging.getLogger("hansa")

FAILED = "failed"

REASONS = {
    # a frame that cannot be read
    "oversize": "the message has more bytes than the site's policy permits",
    "truncated": "the message is incomplete",
    "damaged": "the digest of the message does not match",
    "version": "the site has another version of Hansa or of the protocol",
    "inflated": "the message would unpack to far more than its size",
    "malformed": "the message is not one of the protocol",
    # a message that is not for this site, or asks for more than it permits
    "charge": "the site is not enrolled in this run",
    "site": "the message is for another site: the keys or --site of two sites are exchanged",
    "run": "the message is of another run",
    "round": "the message mixes rounds, or releases memory of future rounds",
    "rounds": "the run has more rounds than the site's policy permits",
    "steps": "the run has more local steps than the site's policy permits",
    "code": "the configuration names code that the site's policy does not list under factories",
    "data": "the configuration names data that the site's policy does not list",
    "channels": "the message has other channels than the algorithm",
    "clients": "the message is for clients of other sites, or for one client twice",
    "stamps": "the memory version of a client is missing",
    "work": "the order has other work than the configuration",
    "rows": "an update would be computed from fewer rows than the site's policy permits (min_rows)",
    "budget": "the site's policy permits no more trainings or evaluations",
    "paths": "the configuration names a file that the site's policy does not list under data",
    "parameters": "the model has more parameters than the site's policy permits",
    # what the site has does not fit, or fails
    "config": "the site cannot use the configuration",
    "site-data": "the site's data cannot be read, or has another number of clients",
    "schema": "the site's table does not fit the schema",
    "no-schema": "the site has tables, which need a schema: the server's configuration has no data.options.schema",
    "no-tables": "the site has no tables: its data is not a folder of CSV files",
    "model": "the site cannot build the model, or has another one",
    "memory": "the site has lost the memory of a client: restore it there, or restart the server with --forget CLIENT",
    "disk": "the site cannot write to its disk",
    "non-finite": "the parameters of a client became non-finite; a smaller local rate or max_grad_norm may help",
    "base": "the broadcast does not decode to the model that was sent",
    FAILED: "the work failed at the site; its own log says why",
    # what the server finds wrong with a reply to its enrollment
    "hello": "the site's reply to the enrollment is not acceptable",
}
"""The codes, with the text that the server prints."""


def known(code: str) -> str:
    """Return a code of the list; any other becomes ``failed``.

    >>> known("disk"), known("/data/patients.csv")
    ('disk', 'failed')
    """
    return code if code in REASONS else FAILED


def code_of(error: BaseException) -> str:
    """Return the code of an error that happened at a site.

    >>> code_of(OSError(28, "No space left on device", "/data/patients")), code_of(ZeroDivisionError())
    ('disk', 'failed')
    """
    reason = getattr(error, "reason", None)
    if isinstance(error, HansaError) and isinstance(reason, str):
        return known(reason)
    if isinstance(error, DataError):
        return "site-data"
    return "disk" if isinstance(error, (OSError, sqlite3.Error)) else FAILED


def without_details(dropped: Iterable[DroppedClient]) -> tuple[DroppedClient, ...]:
    """Return what leaves a site about dropped clients: their numbers and codes. The details go to the site's log."""
    codes = []
    for each in dropped:
        if each.detail:
            log.warning("client %d was left out (%s): %s", each.client, each.reason, each.detail)
        codes.append(DroppedClient(each.client, known(each.reason)))
    return tuple(codes)


def with_texts(site: str, dropped: Iterable[DroppedClient]) -> tuple[DroppedClient, ...]:
    """Return dropped clients of a site with the server's text of each code."""
    codes = [(each.client, known(each.reason)) for each in dropped]
    return tuple(DroppedClient(client, code, f"site {site}: {REASONS[code]}") for client, code in codes)
