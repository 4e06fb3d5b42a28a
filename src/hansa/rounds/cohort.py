"""The mixed local loop: a cohort's clients step on their own data, then X <- W X."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hansa.algorithm import LocalPhase, Mixing
from hansa.compress import Packet, decode
from hansa.gossip.active import resample, selected
from hansa.gossip.rows import DenseRows, LazyRows, Mixer, Rows, lazy_pays
from hansa.local.descent import Descent, Shell, ahead_gradient
from hansa.local.work import Work
from hansa.rounds.messages import Lost, Order, Trained, scoped
from hansa.types import BUFFERS, MODEL, Vector, Vectors
from hansa.vectors.arithmetic import all_finite


@dataclass(slots=True, eq=False)
class Mixed:
    """What a cohort's round came to."""

    trained: dict[int, Trained] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    peer: Counter[int] = field(default_factory=Counter)
    exchanges: int = 0
    info: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def train_together(phase: LocalPhase, order: Order, got: Vectors, shell: Shell, samples: Sequence[int]) -> Mixed:
    """Every step: those who are active take a local step, then everyone gossips."""
    assert phase.mixing is not None
    return _Cohort(phase, phase.mixing, order, got, shell, samples).run()


class _Cohort:
    def __init__(
        self,
        phase: LocalPhase,
        mixing: Mixing,
        order: Order,
        got: Vectors,
        shell: Shell,
        samples: Sequence[int],
    ) -> None:
        self.phase, self.mixing, self.order, self.shell, self.samples = phase, mixing, order, shell, samples
        self.got = got
        self.clients = order.clients
        self.position = {client: i for i, client in enumerate(self.clients)}
        self.dim = got[MODEL].numel()
        buffers = got.get(BUFFERS)
        self.start = got[MODEL] if buffers is None else torch.cat([got[MODEL], buffers])
        self.mixer = Mixer(mixing.topology, len(self.clients))
        self.mixer.lose(*(self.position[client] for client in order.absent))
        self.rows = self._rows()
        self.public = self.start.repeat(len(self.clients), 1) if mixing.compressor is not None else None
        self.descents: dict[int, Descent] = {}
        self.batches: dict[int, torch.Tensor | None] = {}
        self.steps: Counter[int] = Counter()
        self.losses: list[float] = []
        self.mixed = Mixed()

    def run(self) -> Mixed:
        self._pass_on()
        for step in range(self.order.work.steps):
            self._compute(step)
            if not self.mixer.positions:
                return self.mixed
            if (step + 1) % self.mixing.every == 0:
                self._gossip(step)
        self._finish()
        return self.mixed

    def _survivors(self) -> list[int]:
        return [self.clients[i] for i in self.mixer.positions]

    def _active(self, step: int, clients: Sequence[int]) -> list[int]:
        active = self.mixing.active
        if self.mixing.adapted or isinstance(active, selected):
            return sorted(set(self.order.reporters).intersection(clients))
        if isinstance(active, resample):
            active = active.among(len(self.order.reporters))
        return active.draw(self.order.round, step, clients, self.order.key)

    def _rows(self) -> Rows:
        """Dense rows, or lazy ones where the cost rule prefers them and all clients start alike."""
        n, steps = len(self.clients), self.order.work.steps
        if self.mixing.persistent:
            kept = [self.order.memory.get(client, {}).get("local/row") for client in self.clients]
            return DenseRows(torch.stack([self.start if row is None else row for row in kept]))
        active = [len(self._active(step, self.clients)) for step in range(steps)]
        if self.mixing.compressor is None and lazy_pays(
            n, active, self.mixing.every, self.mixer.links, self.start.numel()
        ):
            return LazyRows(self.start, n, sum(active))
        return DenseRows(self.start.repeat(n, 1))

    def _compute(self, step: int) -> None:
        active = self._active(step, self._survivors())
        if not active:
            return
        positions = [self.position[client] for client in active]
        for client, position, row in zip(active, positions, self.rows.read(positions), strict=True):
            loss, after = self._local_step(client, step, row)
            if all_finite(after):
                self.rows.write(position, row, after)
                self.losses.append(loss)
                continue
            self.mixed.lost.append(
                Lost(client, "non-finite", f"its model left the numbers at step {step}; its cluster went on without it")
            )
            self.mixer.lose(position)

    def _local_step(self, client: int, step: int, row: Vector) -> tuple[float, Vector]:
        shell, key = self.shell, self.order.key.child("local", self.order.round, client)
        shell.load(row[: self.dim], row[self.dim :] if row.numel() > self.dim else None)
        if client not in self.batches:
            work = Work(self.order.work.steps, min(self.order.work.batch_size, self.samples[client]))
            self.batches[client] = shell.rows(client, work, key.child("batch"))
            self.descents[client] = self._descent(client)
        rows = self.batches[client]
        shell.seed(key.child("noise", step))
        descent = self.descents[client]
        loss, gradients = ahead_gradient(shell, client, None if rows is None else rows[self.steps[client]], descent)
        self.steps[client] += 1
        descent.step(shell.y, shell.parameters, gradients)
        buffers = shell.read_buffers()
        return float(loss), shell.y.clone() if buffers is None else torch.cat([shell.y, buffers])

    def _descent(self, client: int) -> Descent:
        memory = self.order.memory.get(client, {})
        correction = self.phase.solver.correction(self.got, scoped(memory, "solver"))
        descent = self.phase.descent(self.order.round, self.got[MODEL], correction)
        if self.mixing.persistent:
            descent.restore(scoped(memory, "local/optimizer"), self.got[MODEL])
        return descent

    def _pass_on(self) -> None:
        """The server sends the model to the reporters, who pass it on inside the cluster."""
        if self.mixing.persistent:
            return
        size = self._size()
        reporters = self.order.reporters
        others = len(self.mixer.positions) - len(reporters)
        for place, client in enumerate(reporters):
            share = others // len(reporters) + (place < others % len(reporters))
            if share:
                self.mixed.peer[client] += share * size

    def _gossip(self, step: int) -> None:
        turn = self.order.round * self.order.work.steps + step + 1
        alive = self._survivors()
        self.mixed.exchanges += 1
        if self.mixing.average_every is not None and turn % self.mixing.average_every == 0:
            self.rows.average(self.mixer)
            share = math.ceil(2 * (len(alive) - 1) / len(alive) * self._size())
            self.mixed.peer.update(dict.fromkeys(alive, share))
        elif self.mixing.compressor is not None:
            self._gossip_compressed(step)
        else:
            self.rows.mix(self.mixer)
            sent = (self.mixer.degrees * self._size()).tolist()
            self.mixed.peer.update(dict(zip(alive, sent, strict=True)))

    def _gossip_compressed(self, step: int) -> None:
        """CHOCO: neighbours hear the compressed difference to a public copy, X <- X + gamma (W - I) Xhat."""
        assert isinstance(self.rows, DenseRows)
        assert self.public is not None
        assert self.mixing.compressor is not None
        for degree, position in zip(self.mixer.degrees.tolist(), self.mixer.positions, strict=True):
            client = self.clients[position]
            key = self.order.key.child("gossip", self.order.round, step, client)
            packet = self.mixing.compressor.encode(self.rows.rows[position] - self.public[position], key)
            self.public[position] += decode(packet, self.mixing.compressor, dim=self.start.numel())
            self.mixed.peer[client] += degree * packet.nbytes
        alive = self.mixer.positions
        public = self.public[alive]
        weights = self.mixer.dense(self.start.dtype)
        self.rows.rows[alive] += self.mixing.consensus_rate * (weights @ public - public)

    def _size(self) -> int:
        return Packet.of(self.start).nbytes

    def _finish(self) -> None:
        reporters = [client for client in self.order.reporters if self.mixer.alive[self.position[client]]]
        loss = math.fsum(self.losses) / len(self.losses) if self.losses else None
        finals = self.rows.read([self.position[client] for client in reporters])
        for client, row in zip(reporters, finals, strict=True):
            moved = row - self.start
            buffers = moved[self.dim :] if row.numel() > self.dim else None
            self.mixed.trained[client] = Trained(moved[: self.dim], buffers, loss, self._memory(client, row))
        self.mixed.info["consensus"] = self.rows.spread(self.mixer, self.dim)

    def _memory(self, client: int, row: Vector) -> Vectors:
        if not self.mixing.persistent:
            return {}
        kept = self.descents[client].kept() if client in self.descents else {}
        return {"local/row": row.clone(), **{f"local/optimizer/{name}": value for name, value in kept.items()}}
