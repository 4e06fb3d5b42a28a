"""The net holds: each relation fails for a mistake of the kind it is there for."""

from __future__ import annotations

import sys

import pytest

import hansa.local.work
from hansa.aggregate import aware
from hansa.core.types import Update
from hansa.gossip import executors
from hansa.gossip.cohort import Cohort
from hansa.gossip.rows import SeparateRows
from hansa.local.solvers import Correction, prox
from hansa.rounds import ServerState
from hansa.runs.driver import Run
from hansa.server import participation_scale, scale
from metamorphic import relations
from metamorphic.laboratory import EAGER, NATIVE


def broken(relation, *arguments, **words):
    with pytest.raises(AssertionError):
        relation(*arguments, **words)


def test_batches_of_the_first_members_size(monkeypatch):
    real = Cohort.batch_size
    monkeypatch.setattr(Cohort, "batch_size", lambda self, client: min(real(self, client), 4))
    broken(relations.isolated_clients_are_the_plain_loop, EAGER, "fedavg", "plain")
    broken(relations.the_full_gradient_is_the_one_on_paper, "ha_fed")
    broken(relations.without_neighbours_there_is_only_the_optimizer, NATIVE, "dsgd")


def test_gossip_that_leaks_between_the_isolated(monkeypatch):
    monkeypatch.setattr(SeparateRows, "mix", SeparateRows.average)
    broken(relations.isolated_clients_are_the_plain_loop, NATIVE, "fedadam", "compressed")


def test_a_momentum_that_starts_anew_at_every_step_of_a_cohort(monkeypatch):
    real = Cohort.local_step

    def forgetful(self, client):
        step = real(self, client)
        step.velocity = None
        return step

    monkeypatch.setattr(Cohort, "local_step", forgetful)
    broken(relations.isolated_clients_are_the_plain_loop, NATIVE, "fedavg", "options")


def test_updates_stored_under_each_others_ids(monkeypatch):
    real = aware.combine

    def mixed_up(self, updates, state, ctx):
        ids = [update.client for update in updates]
        swapped = zip(updates, [*ids[1:], ids[0]], strict=True)
        return real(self, [Update(i, u.cohort, u.vector, u.samples, u.steps) for u, i in swapped], state, ctx)

    monkeypatch.setattr(aware, "combine", mixed_up)
    broken(relations.renumbering_permutes, EAGER, "fedaware", "plain")


@pytest.mark.parametrize(("name", "forgotten"), [("choco_sgd", "local/public"), ("dadam", "local/optimizer/m")])
def test_memory_that_ends_with_the_round(name, forgotten, monkeypatch):
    real = executors._memory

    def forgetful(*arguments):
        return {name: row for name, row in real(*arguments).items() if name != forgotten}

    monkeypatch.setattr(executors, "_memory", forgetful)
    broken(relations.steps_may_be_split_over_rounds, name, {})


def test_weights_that_are_not_heard(monkeypatch):
    monkeypatch.setattr(sys.modules["hansa.aggregate.base"], "raw_weights", lambda weights, asked: [1.0] * len(asked))
    broken(relations.a_client_may_stand_twice_with_half_its_weight, EAGER, "fedavg", "plain")


def test_a_control_variate_that_moves_by_m_in_place_of_m_over_n(monkeypatch):
    monkeypatch.setattr(participation_scale, "update", lambda self, d, state, ctx: (d * len(ctx.clients) / 9, state))
    broken(relations.everybody_may_stand_twice, EAGER, "scaffold", "plain")


def test_a_mean_over_everybody_in_place_of_those_who_took_part(monkeypatch):
    def diluted(self, delta, state, ctx):
        return delta * (len(ctx.clients) / ctx.population.count), state

    monkeypatch.setattr(scale, "update", diluted)
    broken(relations.who_never_takes_part_changes_nothing, EAGER, "fedavg", "plain")


def test_a_pull_that_has_lost_its_unit(monkeypatch):
    monkeypatch.setattr(prox, "correction", lambda self, got, memory: Correction(prox_weight=0.5))
    broken(relations.scaling_the_loss_is_scaling_the_rate, EAGER, "fedprox")


def test_all_samples_that_are_only_thirty(monkeypatch):
    monkeypatch.setattr(hansa.local.work, "_effective_batch", lambda size, samples: min(size or 30, samples))
    broken(relations.a_batch_of_everything_is_the_full_gradient, EAGER, "fedavg", "plain")
    broken(relations.the_full_gradient_is_the_one_on_paper, "fedavg")


def test_moments_that_a_resume_forgets(monkeypatch, tmp_path):
    real = Run.restore

    def forgetful(self, tree, history):
        fresh = ServerState.start(self.algorithm, self.state.vectors, self.task.population.count).tree()
        real(self, {**tree, "server": {**tree["server"], "server": fresh["server"]}}, history)

    monkeypatch.setattr(Run, "restore", forgetful)
    broken(relations.a_resumed_run_is_a_run, EAGER, "fedadam", "plain", tmp_path)
