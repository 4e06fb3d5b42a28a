"""Draw a figure of a paper from its recipe: FedCAMS, Figure 4, reduced to what two CPU cores can run.

`hansa reproduce cams-figure-4` runs the same and compares the numbers; here you draw the curves yourself.
"""

import os

import yaml

import hansa
from hansa.config import build, build_algorithm, from_yaml
from hansa.study.recipes import library

recipe = library()["cams-figure-4"]
configs = {
    cell.label: from_yaml(yaml.safe_dump(cell.document)) for cell in recipe.cells(os.environ.get("SCALE", "cpu"))
}
first = next(iter(configs.values()))  # the methods differ; data and model are the same
assert all((c.data, c.model, c.rounds) == (first.data, first.model, first.rounds) for c in configs.values())
task = build.build_task(first, build.load_data(first))
methods = {label: build_algorithm(config) for label, config in configs.items()}
result = hansa.compare(methods, task, rounds=first.rounds, seeds=first.seeds or 1, progress=True)
print(f"{recipe.reference}: {recipe.summary}", result, sep="\n")
result.plot("figure-4.pdf", x="server_bits")
