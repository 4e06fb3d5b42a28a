"""The door: an upload is admitted whole, or refused with a reason, before any state changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hansa.compress import Uplink
from hansa.errors import HansaError
from hansa.orders import Upload
from hansa.types import Vectors


class Refused(HansaError):
    """An upload that may not touch the model."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The server's own account of what it asked for: the schema that every upload is held against."""

    run: str
    round: int
    base: bytes
    reporters: frozenset[int]
    links: Mapping[str, Uplink]
    vectors: Vectors
    max_norm: float = 1e12


def admit(upload: Upload, expected: Expected) -> tuple[Vectors, dict[str, float]]:
    """The upload's vectors and their norms, or `Refused`. Checked from the outside in: sender, run, round, base model;
    then channels, payload length, decoding, dtype and shape; then finite and norm."""
    if upload.client not in expected.reporters:
        raise Refused("sender", f"client {upload.client!r} was not asked to report in round {expected.round}")
    if upload.run != expected.run:
        raise Refused("run", f"from run {upload.run!r}, this is {expected.run!r}")
    if upload.round != expected.round:
        raise Refused("round", f"for round {upload.round!r}, this is round {expected.round}")
    if upload.base != expected.base:
        raise Refused("base", "made from another model than the one sent out this round")
    if set(upload.packets) != set(expected.links):
        raise Refused("channels", f"channels {sorted(upload.packets)}, expected {sorted(expected.links)}")
    if upload.loss is not None and (not isinstance(upload.loss, float) or math.isnan(upload.loss)):
        raise Refused("loss", f"the reported loss is {upload.loss!r}")
    vectors: Vectors = {}
    norms: dict[str, float] = {}
    for name, link in expected.links.items():
        like = expected.vectors[name]
        try:
            vector = link.receive(upload.packets[name], dim=like.numel(), dtype=like.dtype)
        except HansaError as error:
            raise Refused("payload", f"channel {name!r}: {error}") from error
        if vector.shape != like.shape or vector.dtype != like.dtype:
            found = f"{vector.dtype} {tuple(vector.shape)}"
            raise Refused("shape", f"channel {name!r}: {found}, expected {like.dtype} {tuple(like.shape)}")
        norm = float(torch.linalg.vector_norm(vector))
        if not norm <= expected.max_norm:  # also false for NaN; inf entries and overflowing ones give inf or NaN
            reason = "norm" if bool(torch.isfinite(vector).all()) else "non-finite"
            raise Refused(reason, f"channel {name!r}: norm {norm}, at most {expected.max_norm} is admitted")
        vectors[name], norms[name] = vector, norm
    return vectors, norms
