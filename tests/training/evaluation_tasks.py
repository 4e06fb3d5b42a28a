"""Tasks of every kind, drawn at random, each with the numbers that a plain loop over its test rows gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import losses, presets
from hansa.core.keys import Key
from hansa.core.types import MODEL
from hansa.core.vectors.arithmetic import fingerprint
from hansa.data import from_arrays, from_items
from hansa.federation.messages import SiteEvaluationReply, SiteEvaluationRequest
from hansa.federation.site import Site
from hansa.federation.site_metrics import combine_replies
from hansa.rounds.measures import heterogeneity
from hansa.rounds.messages import Broadcast
from hansa.runs.driver import Run
from hansa.training.losses import torch_form
from oracle import evaluation as oracle

FEATURES = 3


class Net(nn.Module):
    """A model as users write theirs; natively trained if it has ReLU and ends in the linear layer."""

    def __init__(self, outputs, shape=None, last=None, relu=True, dropout=0.0, scale=3.0):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, outputs)
        self.drop, self.shape, self.last, self.relu = nn.Dropout(dropout), shape, last, relu
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, x):
        x = self.drop(torch.relu(self.body(x)) if self.relu else torch.tanh(self.body(x)))
        x = self.head(x)
        x = x if self.shape is None else x.view(len(x), *self.shape)
        return x if self.last is None else self.last(x)

    def by_hand(self, rows):
        """The same in NumPy, in float64."""
        w = {name: each.detach().double().numpy() for name, each in self.named_parameters()}
        out = rows.astype(np.float64) @ w["body.weight"].T + w["body.bias"]
        out = (np.maximum(out, 0) if self.relu else np.tanh(out)) @ w["head.weight"].T + w["head.bias"]
        return out if self.shape is None else out.reshape(len(out), *self.shape)


class Focal(nn.CrossEntropyLoss):
    """A subclass of torch's cross-entropy that is not cross-entropy."""

    def __init__(self, gamma=2.0, reduction="mean", obeys=True):
        super().__init__(reduction=reduction)
        self.gamma, self.obeys = gamma, obeys

    def forward(self, output, target):
        value = F.cross_entropy(output, target, reduction="none")
        value = (1 - torch.exp(-value)) ** self.gamma * value
        if self.obeys and self.reduction == "none":
            return value
        return value.sum() if self.reduction == "sum" else value.mean()


def cox(output, target):
    order = torch.argsort(target["time"], descending=True)
    risk, event = output[:, 0][order], target["event"][order]
    return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum().clamp(min=1)


def ranking(output, target):
    score = output[:, 0]
    pairs = target[:, None] > target[None, :]
    margins = torch.relu(1 - score[:, None] + score[None, :])
    return (margins * pairs).sum() / pairs.sum().clamp(min=1)


def contrastive(output, target):
    near = torch.exp(-((output[:, None] - output[None, :]) ** 2).sum(-1))
    same = (target[:, None] == target[None, :]).to(near.dtype)
    return (near.sum(1).log() - (near * same).sum(1).log()).mean()


@dataclass
class Draft:
    """A loss by name, the model and targets for it, and the same loss and accuracy in the oracle's terms.

    A name that has "sum" is of a sum of rows; one that begins with "own" of a loss that takes no weights of rows.
    """

    name: str
    loss: Any
    model: partial[nn.Module]
    targets: Any
    entries: Callable[[Any, Any], Any] | None = None
    """The entries of a row by (output, target); None where `whole` is the loss of all rows."""
    whole: Callable[[Any, Any], float] | None = None
    accuracy: Callable[[Any, Any], tuple[float, float]] | None = None
    """Accuracy by (outputs, targets), and the share of nearly tied predictions."""
    reduction: str | None = "mean"
    """What may be stated of a loss of one's own."""
    classes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Problem:
    """A task and the loop that gives its numbers."""

    kind: str
    draft: Draft
    task: hansa.Task
    inputs: np.ndarray
    weights: np.ndarray
    owners: np.ndarray
    metrics: dict[str, Callable[[Any, Any], float]]
    pieces: list[hansa.Task] = field(default_factory=list)
    splits: list[np.ndarray] = field(default_factory=list)

    def expected(self, rows):
        draft, start = self.draft, self.task.start(Key(0), torch.float32)
        output, target = self.task.module(start).by_hand(self.inputs[rows]), take(draft.targets, rows)
        if draft.whole is not None:
            loss = draft.whole(output, target)
        else:
            combine = oracle.sum_of_entries if "sum" in draft.name else oracle.mean_of_entries
            loss = combine(oracle.each_row(draft.entries, output, target), self.weights[rows])
        found = {name: (metric(output, target), None) for name, metric in self.metrics.items()} | {"loss": (loss, None)}
        if draft.accuracy is not None:
            found["accuracy"] = draft.accuracy(output, target)
        return found


def take(tree, rows):
    if isinstance(tree, dict):
        return {name: each[rows] for name, each in tree.items()}
    return [tree[i] for i in rows] if isinstance(tree, list) else tree[rows]


def agree(name, reported, expected, where):
    value, tied = expected
    if math.isnan(value):
        assert math.isnan(reported), f"{where}: {name} is {reported}, expected NaN"
        return
    slack = 2e-4 * (1 + abs(value)) if tied is None else tied + 1e-6
    assert abs(reported - value) <= slack, f"{where}: {name} is {reported}, expected {value}"


def check(problem, where=""):
    """Compare all that the product reports with the loop."""
    task, rows, draft = problem.task, np.arange(len(problem.inputs)), problem.draft
    where = f"{where}{problem.kind}/{draft.name}"
    vectors = task.start(Key(0), torch.float32)
    trainer = task.trainer(torch.float32, torch.device("cpu"))
    reported, expected = task.evaluate(trainer, vectors), problem.expected(rows)
    assert {f"test_{name}" for name in expected} == set(reported), (where, sorted(reported))
    for name, value in expected.items():
        agree(name, reported[f"test_{name}"], value, where)
    for client in task.client_test_sizes:
        trainer.load(vectors[MODEL], None)
        found = task.evaluate_client(trainer, client)
        for name, value in problem.expected(np.flatnonzero(problem.owners == client)).items():
            agree(name, found[name], value, f"{where} at client {client}")
    if problem.pieces:
        check_sites(problem, vectors, where)


def check_sites(problem, vectors, where):
    algorithm = Run(presets.fedavg(steps=1, batch_size=2), problem.task).algorithm
    broadcasts = {MODEL: Broadcast.whole(vectors[MODEL], 1)}
    request = SiteEvaluationRequest("run", 0, broadcasts, fingerprint(vectors[MODEL]))
    replies = {}
    for number, piece in enumerate(problem.pieces):
        site = Site(algorithm, piece, [0])
        answer = site.handle(request.to_bytes())
        assert answer is not None, (where, site.refusals)
        replies[f"site-{number}"] = SiteEvaluationReply.from_bytes(answer)
    found = combine_replies(replies).metrics
    values = [problem.expected(rows) for rows in problem.splits]
    if problem.task.loss_sums is None:  # computed at each site
        loss = sum(len(rows) * each["loss"][0] for rows, each in zip(problem.splits, values, strict=True))
        agree("loss", found["sites_test_loss"], (loss / len(problem.inputs), None), f"{where} at sites")
    else:
        everything = problem.expected(np.arange(len(problem.inputs)))
        agree("loss", found["sites_test_loss"], everything["loss"], f"{where} at sites")
        if problem.task.metric is not None and "accuracy" in everything and "sites_test_accuracy" in found:
            agree("accuracy", found["sites_test_accuracy"], everything["accuracy"], f"{where} at sites")


def check_heterogeneity(problem):
    """Full gradients, from all rows of a client at once in float64."""
    task = problem.task
    found = heterogeneity(task, samples=2)
    module = task.module(task.start(Key(0), torch.float32)).double().eval()
    total = 0
    for client in range(task.population.count):
        rows = task.data.rows(client)
        source = task.trainer(torch.float32, torch.device("cpu")).source
        x, y = source.batch(client, rows)
        module.zero_grad()
        value = task.loss(module(x.double()).float(), y)
        if task.sums_rows:
            weight = float(y.weight.sum()) if isinstance(y, losses.WeightedTargets) else len(rows)
            value = value / max(weight, 1e-30)
        value.backward()
        total = total + torch.cat([each.grad.reshape(-1) for each in module.parameters()])
    norm = float((total / task.population.count).norm())
    assert abs(found.gradient_norm - norm) <= 1e-3 * (norm + 1e-3), (problem.kind, problem.draft.name, norm, found)


def of_classes(ignored=None):
    """The accuracy of one label a row."""
    return lambda o, y: oracle.accuracy([[row] for row in o], [[int(each)] for each in y], ignored)


def classes(draw, random, rows):
    count = draw(st.integers(2, 5))
    targets = random.integers(0, count, rows)
    targets[:count] = np.arange(count)[: len(targets[:count])]
    weight = random.uniform(0.2, 4.0, count).astype(np.float32)
    tensor, ignored = torch.from_numpy(weight), int(random.integers(0, count))
    smoothing, gamma = float(random.uniform(0.05, 0.4)), float(random.uniform(0.5, 3))

    def ce(weight=None, ignored=-100, smoothing=0.0):
        return lambda o, y: oracle.cross_entropy(o, int(y), weight, ignored, smoothing)

    def focal(o, y):
        return oracle.focal(o, int(y), gamma)

    table = {
        "function": (F.cross_entropy, ce()),
        "sum": (nn.CrossEntropyLoss(reduction="sum"), ce()),
        "weight": (nn.CrossEntropyLoss(weight=tensor), ce(weight)),
        "ignored": (nn.CrossEntropyLoss(ignore_index=ignored), ce(None, ignored)),
        "smooth": (nn.CrossEntropyLoss(weight=tensor, label_smoothing=smoothing), ce(weight, -100, smoothing)),
        "all, ignored": (
            nn.CrossEntropyLoss(weight=tensor, label_smoothing=smoothing, ignore_index=ignored),
            ce(weight, ignored, smoothing),
        ),
        "ours": (losses.cross_entropy(weight.tolist(), label_smoothing=smoothing), ce(weight, -100, smoothing)),
        "ours, ignored": (losses.cross_entropy(ignore_index=ignored), ce(None, ignored)),
        "nll": (nn.NLLLoss(weight=tensor), ce(weight)),
        "own": (lambda o, y: F.cross_entropy(o, y), ce()),
        "own weight": (lambda o, y: F.cross_entropy(o.float(), y, weight=tensor), ce(weight)),
        "own, ignored": (lambda o, y: F.cross_entropy(o, y, ignore_index=ignored), ce(None, ignored)),
        "own focal": (Focal(gamma), focal),
        "own focal sum": (Focal(gamma, "sum"), focal),
        "margin": (nn.MultiMarginLoss(), lambda o, y: oracle.multi_margin(o, int(y))),
    }
    name = draw(st.sampled_from(sorted(table)))
    loss, entries = table[name]
    skipped = ignored if "ignored" in name else None
    if name == "own, ignored" and (targets == skipped).all():
        targets[0] = (skipped + 1) % count
    metric = draw(st.sampled_from([None] * 9 + HITS))
    return Draft(
        name, loss, partial(Net, count, last=(lambda x: torch.log_softmax(x, 1)) if name == "nll" else None), targets,
        entries, accuracy=of_classes(skipped if metric is None else None),
        reduction={"own, ignored": "labels", "own weight": None}.get(name, "mean"), classes=count,
        options=({"ignored": skipped} if name == "own, ignored" else {}) | ({"metric": metric} if metric else {}),
    )  # fmt: skip


HITS = [
    lambda output, target: (output.argmax(1) == target).double().mean(),
    lambda output, target: output.argmax(1) == target,
    lambda output, target: (output.argmax(1) == target).float()[:, None],
]
"""Metrics of classes: a mean, a value for each row, and a column of them."""


def binary(draw, random, rows):
    targets = random.integers(0, 2, rows)
    targets[:2] = [0, 1]
    factor = float(np.float32(random.uniform(0.2, 6)))

    def asymmetric(o, y):
        return -(factor * y * o[:, 0].log() + (1 - y) * (1 - o[:, 0]).log())

    table = {
        "own logit": (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.to(o.dtype)), None, 1.0),
        "own asymmetric": (lambda o, y: asymmetric(o, y).mean(), torch.sigmoid, factor),
        "own asymmetric sum": (lambda o, y: asymmetric(o, y).sum(), torch.sigmoid, factor),
        "ours": (losses.bce(factor), None, factor),
    }
    name = draw(st.sampled_from(sorted(table)))
    loss, last, positive = table[name]

    def accuracy(output, target):
        return oracle.accuracy_above([float(row[0]) for row in output], [int(y) for y in target], 0.0)

    return Draft(
        name, loss, partial(Net, 1, last=last, scale=2.0 if last is None else 0.5), targets,
        lambda o, y: [oracle.bce(o[0], float(y), positive)],
        accuracy=accuracy if name == "ours" else None,  # else nobody says whether it is a logit or a probability
    )  # fmt: skip


class Doubled(nn.MSELoss):
    """A subclass with another value."""

    def forward(self, output, target):
        return 2 * super().forward(output, target)


def numbers(draw, random, rows):
    width = draw(st.integers(1, 3))
    targets = (3 * random.normal(size=(rows, width))).astype(np.float32)
    delta = float(random.uniform(0.3, 2))

    def twice(a, b):
        return (2 * oracle.squared(a, b)[0], 1.0)

    table = {
        "function": (F.mse_loss, oracle.squared),
        "partial sum": (partial(F.l1_loss, reduction="sum"), oracle.absolute),
        "l1": (nn.L1Loss(), oracle.absolute),
        "partial huber": (partial(F.huber_loss, delta=delta), partial(oracle.huber, delta=delta)),
        "own double": (Doubled(), twice),
        "own double sum": (Doubled(reduction="sum"), twice),
        "own": (lambda o, y: ((o - y) ** 2).mean(), oracle.squared),
        "own sum": (lambda o, y: ((o - y) ** 2).sum(), oracle.squared),
        "ours": (losses.huber(delta), partial(oracle.huber, delta=delta)),
        "ours mse": (losses.mse(), oracle.squared),
        "ours l1": (losses.l1(), oracle.absolute),
    }
    name = draw(st.sampled_from(sorted(table)))
    loss, entry = table[name]
    return Draft(
        name, loss, partial(Net, width), targets, lambda o, y: [entry(a, float(b)) for a, b in zip(o, y, strict=True)]
    )


def several_labels(draw, random, rows):
    width = draw(st.integers(2, 4))
    targets = random.integers(0, 2, (rows, width)).astype(np.float32)
    positive, weight = (random.uniform(0.2, 4, width).astype(np.float32) for _ in range(2))
    pos, own, ones = torch.from_numpy(positive), torch.from_numpy(weight), np.ones(width)
    logits = F.binary_cross_entropy_with_logits
    table = {
        "function": (logits, ones, ones),
        "weight": (nn.BCEWithLogitsLoss(weight=own, pos_weight=pos), positive, weight),
        "sum": (nn.BCEWithLogitsLoss(pos_weight=pos, reduction="sum"), positive, ones),
        "partial": (partial(logits, pos_weight=pos), positive, ones),
        "soft margin": (nn.MultiLabelSoftMarginLoss(), ones, ones),
        "own": (lambda o, y: logits(o, y.to(o.dtype), pos_weight=pos.to(o.dtype)), positive, ones),
    }
    name = draw(st.sampled_from(sorted(table)))
    loss, p, w = table[name]
    return Draft(
        name, loss, partial(Net, width), targets,
        lambda o, y: [oracle.bce(o[c], float(y[c]), float(p[c]), float(w[c])) for c in range(width)],
    )  # fmt: skip


def sequences(draw, random, rows):
    count, length = draw(st.integers(2, 4)), draw(st.integers(2, 5))
    targets = random.integers(0, count, (rows, length))
    lengths = random.integers(1, length + 1, rows)
    padding = draw(st.sampled_from([None, -100, 0]))
    if padding is not None:
        targets[np.arange(length) >= lengths[:, None]] = padding
    targets[0, : min(2, length)] = [1, count - 1][: min(2, length)]
    last = draw(st.booleans())
    ignored = -100 if padding is None else padding

    def positions(o):
        return o if last else o.T

    def own(o, y, shift=0):
        scores = o if last else o.movedim(1, -1)
        scores = scores[:, : length - shift].reshape(-1, count)
        return F.cross_entropy(scores, y[:, shift:].reshape(-1), ignore_index=ignored)

    table = {
        "own": own,
        "own, shifted": partial(own, shift=1),
        "ours": losses.cross_entropy(ignore_index=ignored, class_axis="last" if last else "second"),
    }
    if not last:
        table["module"] = nn.CrossEntropyLoss(ignore_index=ignored)
        table["partial"] = partial(F.cross_entropy, ignore_index=ignored)
    name = draw(st.sampled_from(sorted(table)))
    shift, of_ones_own = int("shifted" in name), name.startswith("own")

    def entries(o, y):
        row = positions(o)
        pairs = [(row[t], int(y[t + shift])) for t in range(length - shift)]
        return [each for scores, label in pairs for each in oracle.cross_entropy(scores, label, None, ignored, 0.0)]

    def accuracy(output, target):
        return oracle.accuracy(
            [list(positions(o)) for o in output], [[int(each) for each in y] for y in target], ignored
        )

    return Draft(
        name, table[name], partial(Net, count * length, shape=(length, count) if last else (count, length)), targets,
        entries, accuracy=None if of_ones_own else accuracy,  # nobody says which label a position predicts
        reduction="labels" if name == "own" else None,
        options={"ignored": padding} if of_ones_own else {},
    )  # fmt: skip


LONGEST = 5


class Ragged(Net):
    """Scores of as many positions as the batch has."""

    def forward(self, x):
        inputs, length = x[:, :FEATURES], int(x[:, FEATURES].max())
        return super().forward(inputs)[:, :length]


def collate(inputs, targets, items):
    """Pad the labels of some rows to the longest of them."""
    lengths = [len(targets[i]) for i in items]
    labels = torch.full((len(items), max(lengths)), -100)
    for place, i in enumerate(items):
        labels[place, : lengths[place]] = torch.as_tensor(targets[i])
    x = torch.cat([torch.from_numpy(inputs[items]), torch.full((len(items), 1), float(max(lengths)))], 1)
    return x, labels


def ragged(draw, random, rows):
    count = draw(st.sampled_from([2, 3, 7]))
    targets = [random.integers(0, count, int(length)).tolist() for length in random.integers(1, LONGEST + 1, rows)]
    table = {
        "own": lambda o, y: F.cross_entropy(o.movedim(-1, 1), y),
        "ours": losses.cross_entropy(class_axis="last"),
        "flat": lambda o, y: F.cross_entropy(o.reshape(-1, count), y.reshape(-1)),
    }
    name = draw(st.sampled_from(sorted(table)))

    def entries(o, y):
        return [each for t, label in enumerate(y) for each in oracle.cross_entropy(o[t], label, None, -100, 0.0)]

    def accuracy(output, target):
        return oracle.accuracy([list(o[: len(y)]) for o, y in zip(output, target, strict=True)], target, None)

    return Draft(
        name, table[name], partial(Ragged, count * LONGEST, shape=(LONGEST, count)), targets, entries,
        accuracy=accuracy if name == "ours" else None, reduction="labels",
    )  # fmt: skip


def coupled(draw, random, rows):
    kinds = random.integers(0, 2, rows)
    kinds[:2] = [0, 1]
    survival = {
        "time": random.permutation(rows).astype(np.float32),
        "event": (random.random(rows) < 0.6).astype(np.float32),
    }
    survival["event"][0] = 1

    def column(o):
        return [float(row[0]) for row in o]

    table = {
        "cox": (cox, survival, lambda o, y: oracle.cox(column(o), list(y["time"]), list(y["event"]))),
        "ranking": (
            ranking, random.normal(size=rows).astype(np.float32), lambda o, y: oracle.ranking(column(o), list(y)),
        ),
        "contrastive": (contrastive, kinds, lambda o, y: oracle.contrastive(o, list(y))),
    }  # fmt: skip
    name = draw(st.sampled_from(sorted(table)))
    loss, targets, whole = table[name]
    model = partial(Net, 2 if name == "contrastive" else 1, scale=1.0)
    return Draft(
        name,
        loss,
        model,
        targets,
        whole=whole,
        accuracy=of_classes() if name == "contrastive" else None,
        reduction=None,
    )


KINDS = {
    "class": classes,
    "binary": binary,
    "regression": numbers,
    "labels": several_labels,
    "sequence": sequences,
    "ragged": ragged,
    "coupled": coupled,
}


@st.composite
def problems(draw, kinds=("class", *KINDS)):
    """A problem of a random kind; classes are twice as likely."""
    kind = draw(st.sampled_from(kinds))
    seed, rows = draw(st.integers(0, 10**6)), draw(st.integers(4, 60))
    draft = KINDS[kind](draw, np.random.default_rng(seed), rows)
    model = partial(draft.model, relu=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.4])))
    options = {
        **draft.options,
        "evaluation_batch_size": draw(st.sampled_from([None, 1, 2, 3, 7, 16])),
        "execution": draw(st.sampled_from(["auto", "eager"])),
    }
    if torch_form(draft.loss) is None and not hasattr(draft.loss, "sums"):
        options["reduction"] = "sum" if "sum" in draft.name else draw(st.sampled_from([None, draft.reduction]))
    by_hand = {}
    if model.keywords.get("last") is None and draw(st.integers(0, 3)) == 0:
        options["metrics"] = {"margin": hansa.higher(lambda o, y: o.double().std(correction=0))}
        # ragged outputs are padded to the longest of all rows
        by_hand["margin"] = lambda o, y: float(np.asarray(o)[:, : max(map(len, y)) if kind == "ragged" else None].std())
    random = np.random.default_rng(seed + 1)
    inputs, targets = random.normal(size=(rows, FEATURES)).astype(np.float32), draft.targets
    owners = random.integers(0, 3, rows)
    owners[:3] = [0, 1, 2]
    takes_weights = kind not in ("ragged", "coupled") and not draft.name.startswith("own")
    is_weighted = takes_weights and draw(st.integers(0, 2)) == 0
    weights = random.uniform(0.1, 3.0, rows).astype(np.float32) if is_weighted else np.ones(rows, np.float32)
    if is_weighted:
        weights[rows // 2] = 0.0

    def data(tested):
        if kind == "ragged":
            items = list(range(rows))
            pad = partial(collate, inputs, targets)
            return from_items(items, pad, clients=owners, test=items, test_clients=owners)
        test = (inputs[tested], take(targets, tested), weights[tested])[: 2 + is_weighted]
        more = {"weights": weights} if is_weighted else {}
        more |= {"test_clients": owners} if len(tested) == rows else {}
        return from_arrays(inputs, targets, clients=owners, test=test, classes=draft.classes, **more)

    build = partial(hansa.Task, model, draft.loss, **options)
    task = build(data(np.arange(rows)))
    problem = Problem(kind, draft, task, inputs, weights.astype(float), owners, by_hand)
    if kind != "ragged" and draw(st.integers(0, 3)) == 0:
        problem.splits = [np.arange(rows // 3), np.arange(rows // 3, rows)]
        problem.pieces = [build(data(own)) for own in problem.splits]
    return problem
