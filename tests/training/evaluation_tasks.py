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
from hansa.core.vectors.fingerprint import fingerprint
from hansa.data import from_arrays, from_items
from hansa.federation import Site, SiteEvaluationReply, SiteEvaluationRequest
from hansa.federation.site_metrics import combine_replies
from hansa.rounds.measures import heterogeneity
from hansa.rounds.messages import Broadcast
from hansa.runs.driver import Run
from hansa.training.losses import torch_form
from oracle import evaluation as oracle

FEATURES = 3
KINDS = ("class", "class", "binary", "regression", "labels", "sequence", "ragged", "coupled")


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
class Problem:
    """A task and the loop that gives its numbers."""

    kind: str
    name: str
    task: hansa.Task
    loss_of: Callable[[Any, Any, Any], float]
    """The loss by (outputs, targets, row weights), all NumPy."""
    accuracy_of: Callable[[Any, Any], tuple[float, float]] | None
    """Accuracy by (outputs, targets), and the share of nearly tied predictions."""
    inputs: np.ndarray
    targets: Any
    weights: np.ndarray
    owners: np.ndarray
    metrics: dict[str, Callable[[Any, Any], float]] = field(default_factory=dict)
    pieces: list[hansa.Task] = field(default_factory=list)
    splits: list[np.ndarray] = field(default_factory=list)

    def outputs(self, rows):
        start = self.task.start(Key(0), torch.float32)
        return self.task.module(start).by_hand(self.inputs[rows])

    def expected(self, rows):
        output, target = self.outputs(rows), take(self.targets, rows)
        found = {"loss": (self.loss_of(output, target, self.weights[rows]), None)}
        if self.accuracy_of is not None:
            found["accuracy"] = self.accuracy_of(output, target)
        for name, function in self.metrics.items():
            found[name] = (function(output, target), None)
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
    task, rows = problem.task, np.arange(len(problem.inputs))
    where = f"{where}{problem.kind}/{problem.name}"
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
        site.run = "run"
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
    assert abs(found.gradient_norm - norm) <= 1e-3 * (norm + 1e-3), (problem.kind, problem.name, norm, found)


@st.composite
def problems(draw, kinds=KINDS):
    """A problem of a random kind."""
    kind = draw(st.sampled_from(kinds))
    seed, rows = draw(st.integers(0, 10**6)), draw(st.integers(4, 60))
    options = {
        "evaluation_batch_size": draw(st.sampled_from([None, 1, 2, 3, 7, 16])),
        "execution": draw(st.sampled_from(["auto", "eager"])),
    }
    make = {
        "class": classes,
        "binary": binary,
        "regression": numbers,
        "labels": several_labels,
        "sequence": sequences,
        "ragged": ragged,
        "coupled": coupled,
    }[kind]
    name, loss, model, targets, loss_of, accuracy_of, data_options, more = make(draw, np.random.default_rng(seed), rows)
    random = np.random.default_rng(seed + 1)
    inputs = random.normal(size=(rows, FEATURES)).astype(np.float32)
    owners = random.integers(0, 3, rows)
    owners[:3] = [0, 1, 2]
    weights = np.ones(rows)
    if more.pop("weighted", False):
        weights = random.uniform(0.1, 3.0, rows).astype(np.float32)
        weights[rows // 2] = 0.0
        data_options = {**data_options, "weights": weights}
    test = (inputs, targets, weights.astype(np.float32)) if "weights" in data_options else (inputs, targets)
    metrics, by_hand = {}, {}
    if model.keywords.get("last") is None and draw(st.integers(0, 3)) == 0:
        metrics["margin"] = hansa.higher(lambda o, y: o.double().std(correction=0))
        by_hand["margin"] = lambda o, y: float(np.asarray(o).std())
    options |= {name: more.pop(name) for name in ("metric", "ignored") if name in more}
    if torch_form(loss) is None and not hasattr(loss, "sums"):
        mine = "sum" if "sum" in name else more.pop("reduction", "mean")
        options["reduction"] = mine if mine == "sum" else draw(st.sampled_from([None, mine]))
    if kind == "ragged":
        data = from_items(
            list(range(rows)), partial(collate, inputs, targets), clients=owners, test=list(range(rows)),
            test_clients=owners,
        )  # fmt: skip
    else:
        data = from_arrays(inputs, targets, clients=owners, test=test, test_clients=owners, **data_options)
    build = partial(hansa.Task, model, loss, metrics=metrics, **options)
    if kind == "ragged" and by_hand:
        by_hand["margin"] = None
    problem = Problem(kind, name, build(data), loss_of, accuracy_of, inputs, targets, weights.astype(float), owners,
                      {name: f for name, f in by_hand.items() if f is not None})  # fmt: skip
    if kind == "ragged" and metrics:  # outputs that are padded to the longest of all rows
        problem.metrics = {"margin": ragged_spread}
    if kind != "ragged" and draw(st.integers(0, 3)) == 0:
        problem.splits = [np.arange(rows // 3), np.arange(rows // 3, rows)]
        for own in problem.splits:
            pair = (inputs[own], take(targets, own), *([weights[own].astype(np.float32)] if len(test) == 3 else []))
            problem.pieces.append(build(from_arrays(inputs, targets, clients=owners, test=pair, **data_options)))
    return problem


def classes(draw, random, rows):
    count = draw(st.integers(2, 5))
    targets = random.integers(0, count, rows)
    targets[:count] = np.arange(count)[: len(targets[:count])]
    weight = random.uniform(0.2, 4.0, count).astype(np.float32)
    tensor, ignored = torch.from_numpy(weight), int(random.integers(0, count))
    smoothing, gamma = float(random.uniform(0.05, 0.4)), float(random.uniform(0.5, 3))

    def ce(*options):
        return lambda o, y: oracle.cross_entropy(o, int(y), *options)

    plain, weighted, skipping = ce(None, -100, 0.0), ce(weight, -100, 0.0), ce(None, ignored, 0.0)
    smooth, both = ce(weight, -100, smoothing), ce(weight, ignored, smoothing)
    mean, total = oracle.mean_of_entries, oracle.sum_of_entries
    table = {
        "function": (F.cross_entropy, plain, mean, None, True),
        "sum": (nn.CrossEntropyLoss(reduction="sum"), plain, total, None, True),
        "weight": (nn.CrossEntropyLoss(weight=tensor), weighted, mean, None, True),
        "ignore": (nn.CrossEntropyLoss(ignore_index=ignored), skipping, mean, ignored, True),
        "smooth": (nn.CrossEntropyLoss(weight=tensor, label_smoothing=smoothing), smooth, mean, None, True),
        "all": (
            nn.CrossEntropyLoss(weight=tensor, label_smoothing=smoothing, ignore_index=ignored), both, mean, ignored,
            True,
        ),
        "ours": (losses.cross_entropy(weight.tolist(), label_smoothing=smoothing), smooth, mean, None, True),
        "our ignored": (losses.cross_entropy(ignore_index=ignored), skipping, mean, ignored, True),
        "nll": (nn.NLLLoss(weight=tensor), weighted, mean, None, True),
        "own": (lambda o, y: F.cross_entropy(o, y), plain, mean, None, False),
        "own weight": (lambda o, y: F.cross_entropy(o.float(), y, weight=tensor), weighted, mean, None, False),
        "own ignored": (
            lambda o, y: F.cross_entropy(o, y, ignore_index=ignored), skipping, mean, ignored, False,
        ),
        "focal": (Focal(gamma), lambda o, y: oracle.focal(o, int(y), gamma), mean, None, False),
        "focal sum": (Focal(gamma, "sum"), lambda o, y: oracle.focal(o, int(y), gamma), total, None, False),
        "margin": (nn.MultiMarginLoss(), lambda o, y: oracle.multi_margin(o, int(y)), mean, None, True),
    }  # fmt: skip
    name = draw(st.sampled_from(sorted(table)))
    loss, entries, combine, skipped, weightable = table[name]
    if skipped is not None and name == "own ignored" and (targets == skipped).all():
        targets[0] = (skipped + 1) % count
    log = name.startswith("nll")
    relu, dropout = draw(st.booleans()), draw(st.sampled_from([0.0, 0.4]))
    last = (lambda x: torch.log_softmax(x, 1)) if log else None
    options = {"weighted": weightable and draw(st.integers(0, 2)) == 0}
    if name == "own ignored":
        options |= {"ignored": skipped, "reduction": "labels"}
    elif name == "own weight":
        options["reduction"] = None

    def loss_of(output, target, weights):
        return combine(oracle.each_row(entries, output, target), weights)

    def accuracy_of(output, target):
        return oracle.accuracy([[row] for row in output], [[int(y)] for y in target], skipped)

    if draw(st.integers(0, 3)) == 0:
        options["metric"] = draw(st.sampled_from([hit_mean, hit_rows, hit_column]))

        def accuracy_of(o, y):
            return oracle.accuracy([[row] for row in o], [[int(each)] for each in y], None)

    model = partial(Net, count, last=last, relu=relu, dropout=dropout)
    return name, loss, model, targets, loss_of, accuracy_of, {"classes": count}, options


def hit_mean(output, target):
    return (output.argmax(1) == target).double().mean()


def hit_rows(output, target):
    return output.argmax(1) == target


def hit_column(output, target):
    return (output.argmax(1) == target).float()[:, None]


def binary(draw, random, rows):
    targets = random.integers(0, 2, rows)
    targets[:2] = [0, 1]
    factor = float(np.float32(random.uniform(0.2, 6)))
    mean = oracle.mean_of_entries

    def asymmetric(o, y):
        return -(factor * y * o[:, 0].log() + (1 - y) * (1 - o[:, 0]).log())

    table = {
        "logit": (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.to(o.dtype)), None, 1.0, mean),
        "asymmetric": (lambda o, y: asymmetric(o, y).mean(), torch.sigmoid, factor, mean),
        "asymmetric sum": (lambda o, y: asymmetric(o, y).sum(), torch.sigmoid, factor, oracle.sum_of_entries),
        "ours": (losses.bce(factor), None, factor, mean),
    }
    name = draw(st.sampled_from(sorted(table)))
    loss, last, positive, combine = table[name]

    def loss_of(output, target, weights):
        rows = oracle.each_row(lambda o, y: [oracle.bce(o[0], y, positive)], output, target.astype(float))
        return combine(rows, weights)

    def accuracy_of(output, target):
        return oracle.accuracy_above([float(row[0]) for row in output], [int(y) for y in target], 0.0)

    model = partial(Net, 1, last=last, relu=draw(st.booleans()), scale=2.0 if last is None else 0.5)
    known = accuracy_of if name == "ours" else None  # else nobody says whether it is a logit or a probability
    return name, loss, model, targets, loss_of, known, {}, {"weighted": name == "ours" and draw(st.booleans())}


class Doubled(nn.MSELoss):
    """A subclass with another value."""

    def forward(self, output, target):
        return 2 * super().forward(output, target)


def numbers(draw, random, rows):
    width = draw(st.integers(1, 3))
    targets = (3 * random.normal(size=(rows, width))).astype(np.float32)
    delta = float(random.uniform(0.3, 2))
    mean, total = oracle.mean_of_entries, oracle.sum_of_entries

    def by_entry(f):
        return lambda o, y: [f(a, float(b)) for a, b in zip(o, y, strict=True)]

    def twice(a, b):
        return (2 * oracle.squared(a, b)[0], 1.0)

    table = {
        "function": (F.mse_loss, by_entry(oracle.squared), mean, True),
        "partial sum": (partial(F.l1_loss, reduction="sum"), by_entry(oracle.absolute), total, True),
        "l1": (nn.L1Loss(), by_entry(oracle.absolute), mean, True),
        "partial huber": (partial(F.huber_loss, delta=delta), by_entry(partial(oracle.huber, delta=delta)), mean, True),
        "subclass": (Doubled(), by_entry(twice), mean, False),
        "subclass sum": (Doubled(reduction="sum"), by_entry(twice), total, False),
        "own": (lambda o, y: ((o - y) ** 2).mean(), by_entry(oracle.squared), mean, False),
        "own sum": (lambda o, y: ((o - y) ** 2).sum(), by_entry(oracle.squared), total, False),
        "ours": (losses.huber(delta), by_entry(partial(oracle.huber, delta=delta)), mean, True),
    }
    name = draw(st.sampled_from(sorted(table)))
    loss, entries, combine, weightable = table[name]

    def loss_of(output, target, weights):
        return combine(oracle.each_row(entries, output, target), weights)

    model = partial(Net, width, relu=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.3])))
    return name, loss, model, targets, loss_of, None, {}, {"weighted": weightable and draw(st.booleans())}


def several_labels(draw, random, rows):
    width = draw(st.integers(2, 4))
    targets = random.integers(0, 2, (rows, width)).astype(np.float32)
    positive, weight = (random.uniform(0.2, 4, width).astype(np.float32) for _ in range(2))
    pos, own = torch.from_numpy(positive), torch.from_numpy(weight)

    def entries(p, w):
        return lambda o, y: [oracle.bce(o[c], float(y[c]), float(p[c]), float(w[c])) for c in range(width)]

    ones = np.ones(width)
    mean, total = oracle.mean_of_entries, oracle.sum_of_entries
    logits = F.binary_cross_entropy_with_logits
    table = {
        "function": (logits, entries(ones, ones), mean, True),
        "weight": (nn.BCEWithLogitsLoss(weight=own, pos_weight=pos), entries(positive, weight), mean, True),
        "sum": (nn.BCEWithLogitsLoss(pos_weight=pos, reduction="sum"), entries(positive, ones), total, True),
        "partial": (partial(logits, pos_weight=pos), entries(positive, ones), mean, True),
        "soft margin": (nn.MultiLabelSoftMarginLoss(), entries(ones, ones), mean, True),
        "own": (lambda o, y: logits(o, y.to(o.dtype), pos_weight=pos.to(o.dtype)), entries(positive, ones), mean,
                False),
    }  # fmt: skip
    name = draw(st.sampled_from(sorted(table)))
    loss, rule, combine, weightable = table[name]

    def loss_of(output, target, weights):
        return combine(oracle.each_row(rule, output, target), weights)

    model = partial(Net, width, relu=draw(st.booleans()))
    return name, loss, model, targets, loss_of, None, {}, {"weighted": weightable and draw(st.booleans())}


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

    def flat(o):
        return o.reshape(-1, count) if last else o.movedim(1, -1).reshape(-1, count)

    def positions(o):
        return o if last else o.T

    table = {
        "own": (lambda o, y: F.cross_entropy(flat(o), y.reshape(-1), ignore_index=ignored), 0),
        "shifted": (
            lambda o, y: F.cross_entropy(
                (o[:, :-1] if last else o[:, :, :-1].movedim(1, -1)).reshape(-1, count),
                y[:, 1:].reshape(-1),
                ignore_index=ignored,
            ), 1,
        ),
    }  # fmt: skip
    if not last:
        table["module"] = (nn.CrossEntropyLoss(ignore_index=ignored), 0)
        table["partial"] = (partial(F.cross_entropy, ignore_index=ignored), 0)
    table["ours"] = (losses.cross_entropy(ignore_index=ignored, class_axis="last" if last else "second"), 0)
    name = draw(st.sampled_from(sorted(table)))
    loss, shift = table[name]

    def entries(o, y):
        row = positions(o)
        pairs = [(row[t], int(y[t + shift])) for t in range(length - shift)]
        return [each for scores, label in pairs for each in oracle.cross_entropy(scores, label, None, ignored, 0.0)]

    def loss_of(output, target, weights):
        return oracle.mean_of_entries(oracle.each_row(entries, output, target), weights)

    def accuracy_of(output, target):
        scores = [list(positions(o))[: length - shift] for o in output]
        return oracle.accuracy(scores, [[int(each) for each in y[shift:]] for y in target], ignored)

    shape = (length, count) if last else (count, length)
    model = partial(Net, count * length, shape=shape, relu=draw(st.booleans()))
    options = {"weighted": name in ("module", "partial", "ours") and draw(st.integers(0, 2)) == 0}
    options["reduction"] = "labels" if name == "own" else None
    if name in ("own", "shifted"):  # nobody says which label a position predicts
        accuracy_of = None
        options["ignored"] = padding
    return name, loss, model, targets, loss_of, accuracy_of, {}, options


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


def ragged_spread(outputs, targets):
    longest = max(map(len, targets))
    return float(np.asarray(outputs)[:, :longest].std())


def ragged(draw, random, rows):
    count = draw(st.sampled_from([2, 3, 7]))
    targets = [random.integers(0, count, int(length)).tolist() for length in random.integers(1, LONGEST + 1, rows)]

    def by_position(o):
        return o.movedim(-1, 1)

    table = {
        "own": lambda o, y: F.cross_entropy(by_position(o), y),
        "ours": losses.cross_entropy(class_axis="last"),
        "flat": lambda o, y: F.cross_entropy(o.reshape(-1, count), y.reshape(-1)),
    }
    name = draw(st.sampled_from(sorted(table)))

    def entries(o, y):
        return [each for t, label in enumerate(y) for each in oracle.cross_entropy(o[t], label, None, -100, 0.0)]

    def loss_of(output, target, weights):
        return oracle.mean_of_entries(oracle.each_row(entries, output, target), weights)

    def accuracy_of(output, target):
        return oracle.accuracy([list(o[: len(y)]) for o, y in zip(output, target, strict=True)], target, None)

    model = partial(Ragged, count * LONGEST, shape=(LONGEST, count), relu=draw(st.booleans()))
    known = accuracy_of if name == "ours" else None
    return name, table[name], model, targets, loss_of, known, {}, {"reduction": "labels"}


def coupled(draw, random, rows):
    name = draw(st.sampled_from(["cox", "ranking", "contrastive", "weighted"]))
    width = 2 if name in ("contrastive", "weighted") else 1
    targets: Any = random.normal(size=rows).astype(np.float32)
    accuracy_of = None
    if name == "cox":
        targets = {
            "time": random.permutation(rows).astype(np.float32),
            "event": (random.random(rows) < 0.6).astype(np.float32),
        }
        targets["event"][0] = 1
        loss = cox

        def loss_of(output, target, weights):
            return oracle.cox([float(row[0]) for row in output], list(target["time"]), list(target["event"]))
    elif name == "ranking":
        loss = ranking

        def loss_of(output, target, weights):
            return oracle.ranking([float(row[0]) for row in output], list(target))
    elif name == "contrastive":
        targets, loss = random.integers(0, 2, rows), contrastive
        targets[:2] = [0, 1]

        def loss_of(output, target, weights):
            return oracle.contrastive(output, list(target))

        def accuracy_of(o, y):
            return oracle.accuracy([[row] for row in o], [[int(each)] for each in y], None)
    else:
        targets = random.integers(0, 2, rows)
        targets[:2] = [0, 1]
        factor = np.array([1.0, random.uniform(2, 5)]).astype(np.float32)
        tensor = torch.from_numpy(factor)

        def loss(output, target):
            own = tensor[target]
            return (own * F.cross_entropy(output, target, reduction="none")).sum() / own.sum()

        def loss_of(output, target, weights):
            def entries(o, y):
                return oracle.cross_entropy(o, int(y), factor, -100, 0.0)

            return oracle.mean_of_entries(oracle.each_row(entries, output, target), weights)

        def accuracy_of(o, y):
            return oracle.accuracy([[row] for row in o], [[int(each)] for each in y], None)

    model = partial(Net, width, relu=draw(st.booleans()), scale=1.0)
    return name, loss, model, targets, loss_of, accuracy_of, {}, {"reduction": None}
