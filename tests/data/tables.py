"""Random tables of sites with all kinds of columns, and the draft of their schema."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from hansa.data import Schema, SplitColumn, TableColumn

WARDS = ["icu", "surgery", "cardio", "a:b", "1", "ä, ö"]
STAGES = ("low", "middle", "high")
TRIALS = int(os.environ.get("HANSA_TABLES", "20"))
"""Random tables per test; `make torture` tries more."""


@dataclass
class Tables:
    draft: Schema
    files: dict[str, list[dict[str, str]]]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in self.files.items():
            with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        return folder


def _numbers() -> st.SearchStrategy[str]:
    floats = st.floats(-1e6, 1e6, allow_nan=False).map(repr)
    return floats | st.integers(-1000, 1000).map(str) | st.sampled_from(["0.1", "-0.0", "1e-12", "3"])


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Two to four sites with other categories each, columns in another order each, and missing values."""
    missing = draw(st.sampled_from(["refuse", "indicator", "mean", "constant"]))
    scale = draw(st.sampled_from(["none", "site", "pooled"]))
    fill = -1.5 if missing == "constant" else None
    by_class = draw(st.booleans())
    columns = [
        TableColumn("age", "number", missing=missing, fill=fill, scale=scale),
        TableColumn("dose", "number", scale=draw(st.sampled_from(["none", "pooled"]))),
        TableColumn("ward", "category", tuple(sorted(WARDS)), missing="refuse" if missing == "refuse" else "indicator"),
        TableColumn("stage", "ordinal", STAGES, scale=scale),
        TableColumn("admitted", "date", scale="pooled"),
        TableColumn("note", "text_length", missing="constant", fill=0.0),
        TableColumn("patient", "id"),
        TableColumn("y", "target", ("0", "1", "2")) if by_class else TableColumn("y", "target", target="number"),
    ]
    order = draw(st.permutations(columns))
    split = SplitColumn("fold", ("test",), ("train",)) if draw(st.booleans()) else None
    files = {}
    for site in draw(
        st.lists(st.sampled_from(["north", "east", "south", "west"]), min_size=2, max_size=4, unique=True)
    ):
        wards = draw(st.lists(st.sampled_from(WARDS), min_size=1, max_size=3, unique=True))
        names = draw(st.permutations([column.name for column in columns] + (["fold"] if split else []) + ["extra"]))
        rows = []
        for place in range(draw(st.integers(4, 9))):
            gap = missing != "refuse" and place > 1 and draw(st.integers(0, 3)) == 0
            cells = {
                "age": draw(st.sampled_from(["", "?", "NA"])) if gap else draw(_numbers()),
                "dose": draw(_numbers()),
                "ward": "" if gap else draw(st.sampled_from(wards)),
                "stage": draw(st.sampled_from(STAGES)),
                "admitted": draw(st.dates()).isoformat(),
                "note": draw(st.sampled_from(["", "fine", "a longer note, with a comma"])),
                "patient": f"{site}-{place}",
                "y": str(draw(st.integers(0, 2))) if by_class else draw(_numbers()),
                "fold": "test" if place % 3 == 2 else "train",
                "extra": "only here",
            }
            rows.append({name: cells[name] for name in names})
        files[site] = rows
    return Tables(Schema(tuple(order), split), files)
