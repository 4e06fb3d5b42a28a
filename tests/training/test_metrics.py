"""AUC and C-index against definitions by pairs, and AUCs pooled from sketches against those of all rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.core.errors import HansaError
from hansa.training.metrics import c_index, roc_auc
from mistakes import refused


def auc_by_pairs(scores, labels):
    positive = [s for s, y in zip(scores, labels, strict=True) if y]
    negative = [s for s, y in zip(scores, labels, strict=True) if not y]
    wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    return sum(wins) / len(wins) if wins else math.nan


def c_index_by_pairs(risk, event, time):
    """Harrell's definition, written from its text."""
    score, count = 0.0, 0
    for i, j in itertools.combinations(range(len(risk)), 2):
        if time[i] == time[j] and event[i] and event[j]:
            score, count = score + (1.0 if risk[i] == risk[j] else 0.5), count + 1
            continue
        if time[i] == time[j]:
            first, last = (i, j) if event[i] else (j, i)
        else:
            first, last = (i, j) if time[i] < time[j] else (j, i)
        if event[first]:
            score += 1.0 if risk[first] > risk[last] else 0.5 * (risk[first] == risk[last])
            count += 1
    return score / count if count else math.nan


ROWS = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_area_is_the_share_of_ordered_pairs(rows):
    scores, labels = torch.tensor([float(s) for s, _ in rows]), torch.tensor([int(y) for _, y in rows])
    expected = auc_by_pairs(scores.tolist(), labels.tolist())
    for output in (scores, scores[:, None], torch.stack([-scores, torch.zeros_like(scores)], 1)):
        assert roc_auc(output, labels) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 5)), min_size=2, max_size=25))
def test_the_concordance_index_is_harrells(rows):
    risk = torch.tensor([[float(r)] for r, _, _ in rows])
    target = torch.tensor([[float(e), float(t)] for _, e, t in rows])
    expected = c_index_by_pairs(*zip(*rows, strict=True))
    assert c_index(risk, target) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_many_rows_are_compared_in_blocks():
    draw = torch.Generator().manual_seed(0)
    risk, time = torch.randn(1200, generator=draw), torch.rand(1200, generator=draw)
    target = torch.stack([torch.ones(1200), time], 1)
    ordered = (risk[:, None] > risk) & (time[:, None] < time)
    assert c_index(risk, target) == pytest.approx(int(ordered.sum()) / (1200 * 1199 / 2))


@pytest.mark.parametrize("fewest", [1, 5, 10])
@pytest.mark.parametrize("seed", range(4))
def test_sketches_bound_the_area_of_all_rows_and_have_no_small_count(fewest, seed):
    """Sites of unequal sizes and shares, whose scores differ in level; the estimate is near where cells are small."""
    draw = torch.Generator().manual_seed(seed)
    sites = []
    for rows, shift, share in ((90, 0.0, 0.3), (400, 1.5, 0.7), (60, -2.0, 0.5)):
        labels = (torch.rand(rows, generator=draw) < share).long()
        sites.append((torch.randn(rows, generator=draw) + labels * 1.2 + shift, labels))
    sketches = [roc_auc.sketch(*site, fewest=fewest) for site in sites]
    for sketch, (_, labels) in zip(sketches, sites, strict=True):
        counts = {name: [count for count, _ in sketch[name]] for name in sketch}
        assert min(min(each) for each in counts.values()) >= fewest
        assert (sum(counts["positive"]), sum(counts["negative"])) == (int(labels.sum()), int((1 - labels).sum()))
    found = roc_auc.combine(sketches)
    exact = roc_auc(torch.cat([s for s, _ in sites]), torch.cat([y for _, y in sites]))
    assert found.at_least <= exact <= found.at_most
    assert found.value == pytest.approx(exact, abs={1: 0.002, 5: 0.005, 10: 0.01}[fewest])
    assert found == pytest.approx(roc_auc.combine(sketches[::-1]))


def test_a_group_shows_its_mean_and_nothing_of_its_rows():
    """Two rows of a group that move in opposite directions change nothing that is sent."""
    labels = torch.tensor([0] * 8 + [1] * 8)
    shares = torch.linspace(0.1, 0.9, 16, dtype=torch.float64)
    moved = shares.clone()
    moved[[8, 11]] += torch.tensor([-0.02, 0.02], dtype=torch.float64)
    first, second = (roc_auc.sketch(torch.logit(each), labels, fewest=4) for each in (shares, moved))
    assert first == second
    assert [rows for rows, _ in first["positive"]] == [4, 4]
    assert first["positive"][0][1] == pytest.approx(float(shares[8:12].mean()), abs=1e-6)


def test_equal_scores_count_one_half():
    sketch = roc_auc.sketch(torch.zeros(40), torch.tensor([0, 1] * 20), fewest=5)
    assert roc_auc.combine([sketch, sketch]).value == pytest.approx(0.5)


def test_a_rare_class_has_no_sketch():
    labels = torch.tensor([0] * 20 + [1] * 4)
    assert roc_auc.smallest_group(labels) == 4
    assert roc_auc.sketch(torch.randn(24), labels, fewest=5) is None
    assert roc_auc.sketch(torch.randn(24), torch.zeros(24), fewest=1) is None
    assert c_index.smallest_group(torch.tensor([[1.0, 3.0], [0.0, 2.0], [1.0, 1.0]])) == 2


@pytest.mark.parametrize(
    "groups",
    [[], [[0, 0.5]], [[-3, 0.5]], [[5]], [[5, 0.5, 1]], [[2.5, 0.5]], [[5, -0.1]], [[5, 1.1]], [[5, 0.6], [5, 0.4]],
     [[1 << 50, 0.5]], [[5, 0.5]] * 201],
)  # fmt: skip
def test_impossible_sketches_are_refused(groups):
    good = [[5, 0.5]]
    assert roc_auc.combine([{"positive": good, "negative": good}]).value == pytest.approx(0.5)
    with pytest.raises(ValueError, match="group"):
        roc_auc.combine([{"positive": groups, "negative": good}])
    with pytest.raises(ValueError, match="group"):
        roc_auc.combine([{"positive": good, "negative": groups}])
    with pytest.raises(ValueError, match="two classes"):
        roc_auc.combine([{"positive": good}])


test_bad_outputs_and_targets_are_named = refused(
    (lambda: roc_auc(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])), r"outputs of shape \(4, 3\), expected one or two"),
    (lambda: roc_auc(torch.randn(3), torch.tensor([0, 1, 2])), "expected 0 or 1"),
    (lambda: c_index(torch.randn(3), torch.ones(3)), r"expected \(rows, 2\): event and time"),
    (lambda: c_index(torch.randn(3, 2), torch.ones(3, 2)), r"outputs of shape \(3, 2\), expected one per row"),
)


def test_a_configuration_names_them_without_a_module(tmp_path):
    data = "rounds: 1\ndata: {name: heart-disease, options: {test: 0.25}}\n"
    text = data + "model: {name: logistic, metrics: {auc: NAME}}\n"
    config = hansa.config.from_yaml(text.replace("NAME", "roc_auc"))
    task = hansa.config.build.build_task(config, hansa.config.build.load_data(config))
    assert task.metrics == {"auc": roc_auc}
    assert task.directions == {"auc": "higher"}
    found = task.evaluate(task.trainer(torch.float32, torch.device("cpu")), task.start(hansa.Key(0), torch.float32))
    module = task.module(task.start(hansa.Key(0), torch.float32))
    with torch.no_grad():
        output = module(task.data.test_inputs)
    assert found["test_auc"] == roc_auc(output, task.data.test_targets)
    wrong = hansa.config.from_yaml(text.replace("NAME", "roc_auk"))
    with pytest.raises(HansaError, match=r"model\.metrics\.auc: no 'roc_auk'.*roc_auc"):
        hansa.config.build.build_task(wrong, hansa.config.build.load_data(wrong))
