"""A scikit-learn classifier whose rows belong to sites: fit is a federated run; with a pipeline and a grid search."""

import os
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import hansa


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    def __init__(self, rounds: int = 20, local_lr: float = 0.1) -> None:
        self.rounds, self.local_lr = rounds, local_lr

    def fit(self, X: Any, y: Any, sites: Any) -> Any:
        self.classes_, labels = np.unique(y, return_inverse=True)
        clients = hansa.data.from_arrays(X, labels, clients=sites)
        features, outputs = X.shape[1], len(self.classes_)
        task = hansa.Task(lambda: torch.nn.Linear(features, outputs), torch.nn.functional.cross_entropy, clients)
        self.run_ = hansa.run(hansa.presets.fedams(local_lr=self.local_lr, epochs=1), task, rounds=self.rounds)
        return self

    def predict(self, X: Any) -> Any:
        return self.classes_[hansa.predict(self.run_.model.eval(), torch.tensor(X).float()).argmax(1)]


draw = np.random.default_rng(0)
table = draw.normal([50, 120, 5], [15, 12, 2], size=(600, 3))
ill = np.where(table[:, 0] + table[:, 1] + draw.normal(0, 8, 600) > 175, "ill", "healthy")
sites = {"federatedclassifier__sites": np.repeat(["north", "south", "west"], [400, 150, 50])}
rounds = int(os.environ.get("ROUNDS", "20"))
pipeline = make_pipeline(StandardScaler(), FederatedClassifier(rounds)).fit(table, ill, **sites)
print("accuracy", pipeline.score(table, ill))
search = GridSearchCV(pipeline, {"federatedclassifier__rounds": [1, rounds]}, cv=3).fit(table, ill, **sites)
print("best:", search.best_params_)
