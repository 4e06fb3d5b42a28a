"""Estimators in scikit-learn's style for tables of several sites: `FederatedClassifier` and `FederatedRegressor`.

``hansa.sklearn.FederatedClassifier(rounds=50).fit(X, y, sites=hospital)`` is a plain `hansa.run` and gives its bits:
every site is a client, X is float32, and the loss is cross-entropy or the mean squared error. Needs the extra
``sklearn``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError
from hansa.data import from_arrays
from hansa.presets import fedavg
from hansa.runs.trained_model import predict
from hansa.study.api import run
from hansa.training import Task

if TYPE_CHECKING:

    class BaseEstimator:
        def __getattr__(self, name: str) -> Any: ...

    class ClassifierMixin: ...

    class RegressorMixin: ...
else:
    try:
        from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    except ImportError:  # the estimators say so when they are created
        BaseEstimator, ClassifierMixin, RegressorMixin = (type(name, (), {}) for name in ("_B", "_C", "_R"))

__all__ = ["FederatedClassifier", "FederatedRegressor"]


class _FederatedEstimator(BaseEstimator):
    def __init__(
        self,
        model: Callable[[int, int], nn.Module] = nn.Linear,
        algorithm: Algorithm | None = None,
        *,
        rounds: int = 50,
        random_state: int = 0,
        workers: int | None = None,
    ) -> None:
        if not hasattr(BaseEstimator, "get_params"):
            raise HansaError("hansa.sklearn needs scikit-learn: pip install 'hansa[sklearn]'.")
        self.model, self.algorithm, self.rounds = model, algorithm, rounds
        self.random_state, self.workers = random_state, workers

    def _train(self, X: Any, y: Any, sites: Any, outputs: int, loss: Callable[..., torch.Tensor]) -> None:
        if sites is None:
            sites = np.zeros(len(X), np.int64)
        column = np.asarray(sites)
        if column.shape != (len(X),):
            raise HansaError(f"fit(sites of shape {column.shape}): expected one site for each of {len(X)} rows.")
        self.sites_, numbers = np.unique(column, return_inverse=True)
        data = from_arrays(X, y, clients=numbers, name="table")
        task = Task(partial(self.model, X.shape[1], outputs), loss, data, name=type(self).__name__)
        algorithm = fedavg() if self.algorithm is None else self.algorithm
        seed = 0 if self.random_state is None else int(self.random_state)
        self.run_ = run(algorithm, task, rounds=self.rounds, seed=seed, workers=self.workers)
        self.module_ = self.run_.model.eval()

    def _outputs(self, X: Any) -> torch.Tensor:
        from sklearn.utils.validation import check_is_fitted, validate_data

        check_is_fitted(self)
        return predict(self.module_, torch.from_numpy(validate_data(self, X, dtype=np.float32, reset=False)))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "run_"}


class FederatedClassifier(ClassifierMixin, _FederatedEstimator):
    """A classifier that sites train together.

    After ``fit``, ``run_`` is the run with its history, ``module_`` the trained model, ``classes_`` and ``sites_`` the
    classes and the sites in sorted order. A pickled estimator has no ``run_``.

    Args:
        model: A function of the numbers of features and outputs that returns the model; default: one linear layer.
        algorithm: A preset or a composition; default: FedAvg with its default arguments.
        rounds: The number of communication rounds.
        random_state: The seed of the run; None is 0.
        workers: The number of workers, as in `hansa.run`; results do not depend on it.
    """

    def fit(self, X: Any, y: Any, sites: Any = None) -> FederatedClassifier:
        """Train on a table.

        Args:
            X: Features, [rows, features].
            y: Classes, [rows]: numbers or names.
            sites: The site of every row, numbers or names; without it, one site has all rows.
        """
        from sklearn.utils.multiclass import check_classification_targets
        from sklearn.utils.validation import column_or_1d, validate_data

        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise HansaError(f"fit(y): one class only, {self.classes_[0]!r}: a classifier needs two.")
        self._train(X, labels.astype(np.int64), sites, len(self.classes_), nn.functional.cross_entropy)
        return self

    def predict(self, X: Any) -> Any:
        """Return the most probable class of each row of X, [rows]."""
        best = self._outputs(X).argmax(1).numpy()
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class, in the order of ``classes_``, for each row of X, [rows, classes]."""
        return self._outputs(X).double().softmax(1).numpy()


class FederatedRegressor(RegressorMixin, _FederatedEstimator):
    """A regressor that sites train together; attributes and arguments are those of `FederatedClassifier`."""

    def fit(self, X: Any, y: Any, sites: Any = None) -> FederatedRegressor:
        """Train on a table.

        Args:
            X: Features, [rows, features].
            y: Numbers, [rows].
            sites: The site of every row, numbers or names; without it, one site has all rows.
        """
        from sklearn.utils.validation import validate_data

        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        self._train(X, np.asarray(y, np.float32)[:, None], sites, 1, nn.functional.mse_loss)
        return self

    def predict(self, X: Any) -> Any:
        """Return a number for each row of X, [rows]."""
        return self._outputs(X)[:, 0].numpy()
