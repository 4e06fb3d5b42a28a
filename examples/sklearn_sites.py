"""A scikit-learn estimator trained across three sites of unequal size, alone and in a pipeline with a grid search."""

import os

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import hansa

draw = np.random.default_rng(0)
X = draw.normal([50, 120, 5], [15, 12, 2], size=(600, 3))
y = np.where(X[:, 0] + X[:, 1] + draw.normal(0, 8, 600) > 175, "ill", "healthy")
sites = np.repeat(["north", "south", "west"], [400, 150, 50])


class Net(nn.Module):
    """A model of one's own, made for the numbers of features and outputs."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(features, 8), nn.Linear(8, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(rows)))  # type: ignore[no-any-return]


method = hansa.presets.fedams(local_lr=0.1, server_lr=0.1, epochs=1, batch_size=16)
classifier = hansa.sklearn.FederatedClassifier(Net, method, rounds=int(os.environ.get("ROUNDS", "20")))
pipeline = make_pipeline(StandardScaler(), classifier).fit(X, y, federatedclassifier__sites=sites)
print("accuracy", pipeline.score(X, y), pipeline[-1].classes_, pipeline.predict_proba(X[:2]).round(2))
print(classifier.run_.table("round", "train_loss", "up_bytes"))
search = GridSearchCV(pipeline, {"federatedclassifier__rounds": [1, classifier.rounds]}, cv=3)
print("best:", search.fit(X, y, federatedclassifier__sites=sites).best_params_)
