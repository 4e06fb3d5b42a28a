"""Estimators in scikit-learn's style: the bits of the plain run, scikit-learn's own checks, searches and pipelines."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa

ROWS = 150
SITES = np.array(["north"] * 90 + ["south"] * 45 + ["west"] * 15)
METHOD = hansa.presets.fedams(local_lr=0.1, server_lr=0.1, epochs=1, batch_size=8)


class Net(nn.Module):
    """A model of one's own."""

    def __init__(self, features: int, outputs: int, width: int = 6) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(features, width), nn.Linear(width, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(rows)))


def table() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(ROWS, 4))
    return X, X @ [1.0, -2.0, 0.5, 0.0] + 0.1 * draw.normal(size=ROWS)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hansa.sklearn, "BaseEstimator", object)  # as where it is not installed
    with pytest.raises(hansa.HansaError, match=r"pip install 'hansa\[sklearn\]'"):
        hansa.sklearn.FederatedRegressor()


sklearn = pytest.importorskip("sklearn", reason="not exercised: pip install 'hansa[sklearn]'")


@pytest.mark.usefixtures("shared_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_classifier_is_the_plain_run_to_the_bit(workers: int) -> None:
    X, y = table()
    names = np.where(y > 0, "ill", np.where(y > -1, "healthy", "fit"))
    fitted = hansa.sklearn.FederatedClassifier(Net, METHOD, rounds=4, random_state=3, workers=workers)
    assert fitted.fit(X, names, sites=SITES) is fitted
    labels = np.array([["fit", "healthy", "ill"].index(name) for name in names])
    data = hansa.data.from_arrays(X, labels, clients=SITES)
    task = hansa.Task(lambda: Net(4, 3), nn.functional.cross_entropy, data)
    plain = hansa.run(METHOD, task, rounds=4, seed=3)
    assert torch.equal(fitted.run_.params, plain.params)
    assert fitted.classes_.tolist() == ["fit", "healthy", "ill"]
    assert fitted.sites_.tolist() == ["north", "south", "west"]
    outputs = plain.model(torch.from_numpy(X).float()).detach()
    assert fitted.predict(X).tolist() == [fitted.classes_[best] for best in outputs.argmax(1)]
    assert np.allclose(fitted.predict_proba(X), outputs.double().softmax(1).numpy(), rtol=1e-6)
    assert fitted.score(X, names) == np.mean(fitted.predict(X) == names)
    other = hansa.sklearn.FederatedClassifier(Net, METHOD, rounds=4, random_state=3).fit(X, names)
    assert not torch.equal(other.run_.params, plain.params)  # sites matter


def test_a_regressor_is_the_plain_run_to_the_bit() -> None:
    X, y = table()
    fitted = hansa.sklearn.FederatedRegressor(algorithm=METHOD, rounds=30).fit(X, y, sites=SITES)
    data = hansa.data.from_arrays(X, y[:, None], clients=SITES)
    plain = hansa.run(METHOD, hansa.Task(lambda: nn.Linear(4, 1), nn.functional.mse_loss, data), rounds=30)
    assert torch.equal(fitted.run_.params, plain.params)
    assert fitted.score(X, y) > 0.9


def test_numbers_of_sites_may_have_gaps_and_wrong_ones_are_refused() -> None:
    X, y = table()
    numbers = np.array([7] * 90 + [2] * 60)
    fitted = hansa.sklearn.FederatedRegressor(rounds=1).fit(X, y, sites=numbers)
    assert fitted.sites_.tolist() == [2, 7]
    assert fitted.run_.task.population.samples == (60, 90)
    with pytest.raises(ValueError, match=r"sites of shape \(3,\)\): expected one site for each of 150 rows"):
        hansa.sklearn.FederatedRegressor().fit(X, y, sites=[1, 2, 3])
    with pytest.raises(ValueError, match="one class only"):
        hansa.sklearn.FederatedClassifier().fit(X, np.zeros(ROWS, int))


@pytest.mark.filterwarnings("ignore:Skipping check")
@pytest.mark.parametrize("kind", ["FederatedClassifier", "FederatedRegressor"])
def test_scikit_learns_own_checks_pass(kind: str) -> None:
    """All that apply: one of 55 is left out by scikit-learn itself, unless SCIPY_ARRAY_API is set."""
    from sklearn.utils.estimator_checks import check_estimator

    results = check_estimator(getattr(hansa.sklearn, kind)(rounds=30, workers=1), on_fail=None)
    wrong = [(each["check_name"], each["exception"]) for each in results if each["status"] not in ("passed", "skipped")]
    assert not wrong
    assert [each["check_name"] for each in results if each["status"] == "skipped"] in (["check_array_api_input"], [])
    assert len(results) > 40


def test_clones_searches_pipelines_and_pickles() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y = table()
    estimator = hansa.sklearn.FederatedRegressor(algorithm=METHOD, rounds=2)
    assert clone(estimator).get_params() == estimator.get_params()
    assert estimator.set_params(rounds=20).rounds == 20
    search = GridSearchCV(estimator, {"rounds": [1, 20]}, cv=3).fit(X, y, sites=SITES)
    assert search.best_params_ == {"rounds": 20}
    assert search.best_estimator_.sites_.tolist() == ["north", "south", "west"]
    piped = make_pipeline(StandardScaler(), clone(estimator)).fit(X, y, federatedregressor__sites=SITES)
    again = pickle.loads(pickle.dumps(piped))  # noqa: S301
    assert again.predict(X).tolist() == piped.predict(X).tolist()
    assert not hasattr(again[-1], "run_")
