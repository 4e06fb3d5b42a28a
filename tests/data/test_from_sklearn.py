"""scikit-learn's ColumnTransformer as a schema: the same numbers, or refused with what to do."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import hansa
from hansa.data import TableEncoding, schema_from_sklearn


class ColumnTransformer:
    """Stands in for scikit-learn's where it is not installed: only attributes are read."""

    def __init__(self, transformers, remainder="drop"):
        self.transformers, self.remainder = transformers, remainder


class StandardScaler:
    with_mean = with_std = True


class PCA:
    steps = ()


class SimpleImputer:
    add_indicator, fill_value = False, None

    def __init__(self, strategy):
        self.strategy = strategy


class Pipeline:
    def __init__(self, *steps):
        self.steps = [(type(step).__name__, step) for step in steps]


def test_what_is_not_fitted_is_left_open():
    steps = Pipeline(SimpleImputer("mean"), StandardScaler())
    schema = schema_from_sklearn(ColumnTransformer([("a", steps, ["age"]), ("b", "passthrough", ["sex"])]), "y")
    assert (schema["age"].missing, schema["age"].scale, schema["age"].is_open) == ("mean", "pooled", True)
    assert schema["sex"].kind == "number"
    by_site = schema_from_sklearn(ColumnTransformer([("a", StandardScaler(), ["age"])]), "y", scale="site")
    assert (by_site["age"].scale, by_site["age"].is_open) == ("site", False)


@pytest.mark.parametrize(
    ("transformer", "message"),
    [
        (PCA(), "PCA: has no counterpart"),
        (ColumnTransformer([("p", PCA(), ["age"])]), "PCA: has no counterpart in a schema.*by hand"),
        (ColumnTransformer([("p", StandardScaler(), [0])]), "expected columns by name"),
        (ColumnTransformer([], remainder="passthrough"), "List all columns"),
        (ColumnTransformer([("i", SimpleImputer("median"), ["age"])]), "strategy='median' that is not fitted"),
        (ColumnTransformer([("s", Pipeline(StandardScaler(), PCA()), ["age"])]), "PCA after another transformer"),
    ],
)
def test_others_are_refused_with_the_remedy(transformer, message):
    with pytest.raises(hansa.HansaError, match=message):
        schema_from_sklearn(transformer, "y")


def test_a_fitted_transformer_and_its_schema_give_the_same_inputs():
    pytest.importorskip("sklearn")
    pandas = pytest.importorskip("pandas")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sklearn import compose, impute, pipeline, preprocessing
    draw = np.random.default_rng(2)
    frame = pandas.DataFrame({
        "age": draw.normal(60, 9, 80), "dose": draw.normal(size=80), "height": draw.uniform(150, 190, 80),
        "ward": draw.choice(["icu", "surgery", "cardio"], 80).astype(object),
        "stage": draw.choice(["low", "middle", "high"], 80),
        "site": draw.choice(["a", "b"], 80), "score": draw.integers(0, 5, 80) * 1.0, "y": draw.integers(0, 2, 80),
    })  # fmt: skip
    frame.loc[::7, "age"] = np.nan
    frame.loc[::9, "score"] = np.nan
    frame.loc[::11, "ward"] = np.nan
    parts: list[tuple[str, Any, list[str]]] = [
        ("n", pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.StandardScaler()), ["age", "dose"]),
        ("m", preprocessing.MinMaxScaler(), ["height"]),
        ("c", pipeline.make_pipeline(impute.SimpleImputer(strategy="constant", fill_value="icu"),
                                     preprocessing.OneHotEncoder(handle_unknown="ignore")), ["ward"]),
        ("o", preprocessing.OrdinalEncoder(categories=[["low", "middle", "high"]]), ["stage"]),
        ("i", impute.SimpleImputer(strategy="median", add_indicator=True), ["score"]),
        ("d", "drop", ["site"]),
    ]  # fmt: skip
    transformer = compose.ColumnTransformer(parts, sparse_threshold=0).fit(frame)
    schema = schema_from_sklearn(transformer, "y", classes=["0", "1"])
    expected = transformer.transform(frame)
    np.testing.assert_allclose(TableEncoding(schema).inputs(frame).numpy(), expected, rtol=1e-6, atol=1e-6)
    again = hansa.data.Schema.from_json(schema.to_json())
    assert again == schema
