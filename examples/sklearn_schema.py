"""A fitted ColumnTransformer of scikit-learn as a schema: its means, deviations and categories as JSON."""

import numpy as np
import pandas
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from hansa.data import Schema, TableColumn, TableEncoding

draw = np.random.default_rng(0)
frame = pandas.DataFrame({"age": draw.normal(60, 9, 90), "dose": draw.normal(size=90)})
frame["ward"] = draw.choice(["icu", "surgery", "cardio"], 90)
frame["ill"] = draw.integers(0, 2, 90)
transformer = ColumnTransformer([("numbers", StandardScaler(), ["age", "dose"]), ("names", OneHotEncoder(), ["ward"])])
expected = np.asarray(transformer.fit_transform(frame))

columns = []
for _, part, names in transformer.transformers_:
    if isinstance(part, StandardScaler):
        for name, mean, deviation in zip(names, part.mean_, part.scale_, strict=True):
            columns.append(TableColumn(name, "number", scale="pooled", mean=float(mean), std=float(deviation)))
    elif isinstance(part, OneHotEncoder):
        for name, values in zip(names, part.categories_, strict=True):
            columns.append(TableColumn(name, "category", tuple(values)))
    elif part != "drop":
        raise NotImplementedError(f"{names}: a schema has no counterpart of {part}: transform the files first.")
schema = Schema((*columns, TableColumn("ill", "target", ("0", "1"), target="class")))
print(schema.to_json())
print("largest difference", float(np.abs(TableEncoding(schema).inputs(frame).numpy() - expected).max()))
