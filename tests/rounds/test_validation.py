"""The door: what is refused, for which reason, and that a refused client is an absent one."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.compress import Packet, direct, error_feedback, sign
from hansa.core.keys import Key
from hansa.rounds import close_round
from hansa.rounds.validation import ExpectedUpload, RefusedUpdate, repeated_senders, sender_of, validate_upload
from torture import malformed
from torture.kill import sha
from torture.malformed import Upload, as_report, scene

BASE = bytes(16)
X = torch.tensor([3.0, -4.0])
EXPECTED = ExpectedUpload(
    run="r",
    round=5,
    base=BASE,
    reporters={0: 0, 1: 1, 2: 2},
    links={"model": direct(), "control": error_feedback(sign())},
    vectors={"model": torch.zeros(2), "control": torch.zeros(2)},
    max_norm=100.0,
)


def upload(client=1, **changes):
    packets = {"model": Packet.of(X), "control": sign().encode(X, Key(0))}
    return replace(Upload("r", 5, BASE, client, packets, 0.25), **changes)


def validate(sent, expected=EXPECTED, cohort=1, twice=()):
    return validate_upload(as_report(cohort, sent), 0, expected, twice)


def reason(sent, cohort=1, twice=()):
    with pytest.raises(RefusedUpdate) as caught:
        validate(sent, EXPECTED, cohort, twice)
    return caught.value.reason


def test_an_honest_upload_is_admitted_with_its_norms_and_its_bytes():
    vectors, norms, nbytes = validate(upload())
    assert torch.equal(vectors["model"](), X)
    assert vectors["control"]().tolist() == [3.5, -3.5]  # sign: the mean magnitude, (3 + 4)/2
    assert norms["model"] == 5.0
    assert nbytes == {"model": 24 + 8, "control": 24 + 4 + 1}  # header; two floats; a scale and two bits
    assert validate(upload(loss=None))


@pytest.mark.parametrize("seed", range(6))
def test_malformed_uploads_of_all_kinds_leave_the_round_of_an_absent_client(seed):
    reasons = malformed.run(500, seed=seed)
    assert sum(reasons.values()) == 500
    assert set(reasons) | {"malformed"} == set(REASONS)  # a buffer of bytes that was released is rare


REASONS = (
    "sender", "run", "round", "base", "duplicate", "channels", "loss", "payload", "shape", "non-finite", "norm",
    "malformed",
)  # fmt: skip
WRONG = {
    "sender": {"client": 7},
    "run": {"run": "another"},
    "round": {"round": 4},
    "base": {"base": b"\1" * 16},
    "channels": {"packets": {"model": Packet.of(X)}},
    "loss": {"loss": math.nan},
    "payload": {"packets": {"model": Packet.of(torch.zeros(3)), "control": sign().encode(X, Key(0))}},
}


def test_the_checks_come_in_the_order_that_is_documented():
    """With everything wrong the first reason is given; put right one after the other, the next."""
    everything = upload(**{name: value for wrong in reversed(WRONG.values()) for name, value in wrong.items()})
    given = []
    for name, wrong in WRONG.items():
        # the two that are about packets: first a channel is missing, then its content is wrong
        sent = replace(everything, packets=WRONG["payload"]["packets"]) if name == "payload" else everything
        given.append(reason(sent))
        right = upload()
        everything = replace(everything, **{field: getattr(right, field) for field in wrong})
        if name == "base":
            assert reason(everything, twice={1}) == "duplicate"
    assert given == list(WRONG)
    assert [name for name in REASONS if name in WRONG] == list(WRONG)
    for name in REASONS:
        assert f"``{name}``" in hansa.rounds.validation.__doc__


def test_a_vector_as_long_as_is_admitted_passes_and_a_longer_one_does_not():
    control = upload().packets["control"]
    for length, wanted in ((100.0, None), (100.001, "norm")):
        sent = upload(packets={"model": Packet.of(X * (length / 5)), "control": control})
        if wanted is None:
            assert validate(sent).norms["model"] == pytest.approx(100.0)
        else:
            assert reason(sent) == wanted


def test_nothing_that_a_packet_says_of_itself_is_believed():
    lying = Packet("sign", 10**9, torch.float64, 1, X)
    _, _, nbytes = validate(upload(packets={**upload().packets, "model": lying}))
    assert nbytes["model"] == 24 + 8
    dense = Packet("sign", 2, torch.float32, 29, X)  # a whole vector for the price of its signs
    assert reason(upload(packets={**upload().packets, "control": dense})) == "payload"


def test_a_decoder_that_stumbles_refuses_the_upload_and_nothing_else():
    class broken:
        def receive(self, packet, *, dim, dtype):
            return 1 / 0

    with pytest.raises(RefusedUpdate, match="malformed: ZeroDivisionError"):
        validate(upload(), replace(EXPECTED, links={"model": broken(), "control": broken()}))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
) | st.sampled_from([10**5000, -(10**5000), torch.zeros(2), X, np.zeros(2), Packet.of(X), upload(), object()])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nothing_in_any_field_raises_anything_but_a_refusal(data):
    names = [field.name for field in fields(Upload) if field.name != "packets"]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    sent = replace(upload(), **{name: data.draw(anything, label=name) for name in chosen})
    if data.draw(st.booleans()):
        sent = replace(sent, packets={"model": data.draw(anything), "control": data.draw(anything)})
    assert isinstance(sender_of(sent.client), int)
    try:
        found = validate(sent)
    except RefusedUpdate as refusal:
        told = (refusal.reason in REASONS, len(refusal.detail) < 500)
    else:
        told = tuple(bool(decode().isfinite().all()) for decode in found.vectors.values())
    assert told == (True, True)


def test_an_invalid_upload_does_not_count_against_its_sender():
    late, now = upload(round=4), upload()
    assert repeated_senders(as_report(1, now, now), EXPECTED) == {1}
    assert repeated_senders(as_report(1, late, late), EXPECTED) == frozenset()
    assert reason(late) == "round"
    assert reason(now, twice={1}) == "duplicate"


def test_weights_come_from_the_servers_table_and_nothing_in_an_upload_touches_them():
    """x moves by sum n_i D_i / sum n_i with the table's n_i, whatever losses are claimed; a weight has no place."""
    found = scene("fedavg")
    samples = found.run.task.population.samples
    sent = [upload for _, upload in found.uploads]
    counts = torch.tensor([float(samples[upload.client]) for upload in sent])
    changes = torch.stack([upload.packets["model"].content for upload in sent])
    expected = found.state.vectors["model"] + (counts[:, None] * changes).sum(0) / counts.sum()
    torch.testing.assert_close(found.close(list(found.reports)).state.vectors["model"], expected)
    for loss in (None, -1e9, 1e9, 0.0):
        claimed = [replace(report, losses=[loss] * len(report.clients)) for report in found.reports]
        closed = found.close(claimed)
        assert sha(closed.state.tree()) == sha(found.close(list(found.reports)).state.tree())
    for name in ("weight", "weights", "samples"):
        for weight in (-1.0, math.nan, 1e30):
            claim = {**upload().packets, name: Packet.of(torch.tensor([weight]))}
            assert reason(upload(packets=claim)) == "channels"


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
def test_below_the_quorum_nothing_moves_and_at_it_all_does(quorum):
    found = scene("fedams")
    assert len(found.uploads) == 3
    closed = close_round(
        found.run.algorithm, found.state, found.orders, found.reports, found.run.task.population, quorum=quorum
    )
    same = sha({**closed.state.tree(), "round": 0}) == sha({**found.state.tree(), "round": 0})
    assert closed.outcome.applied == (quorum <= 3)
    assert same == (quorum > 3)
    assert [lost.reason for lost in closed.outcome.dropped] == ([] if quorum <= 3 else ["quorum"] * 3)
