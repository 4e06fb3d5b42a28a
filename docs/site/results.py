"""The pages of reproduced results, made from the numbers in docs/results/reproduced by the present rules.

    python docs/site/results.py [FOLDER]

Prints the table of docs/reproduced.md; with FOLDER it also writes the page and the figures of every recipe there.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from hansa.study.recipes import library
from hansa.study.recipes.outcome import RecipeResult, draw_figures, load_result, result_markdown

RESULTS = Path(__file__).parents[1] / "results" / "reproduced"
WORDS = {"agrees": "agree", "same order": "agree", "differs": "differ", "not comparable": "unshowable"}
VERDICTS = ("agree", "undecided", "differ", "unshowable")


def results() -> dict[str, RecipeResult]:
    """Return the results by recipe."""
    paths = {name: RESULTS / f"{name}.json" for name in library()}
    return {name: load_result(library()[name], path) for name, path in paths.items() if path.exists()}


def counts(result: RecipeResult) -> Counter[str]:
    """Count claims and published numbers by verdict; what the reduction cannot show is counted apart."""
    claims = {True: "agree", False: "differ", None: "undecided"}
    tally = Counter(claims[check.holds] for check in result.claims)
    tally.update(WORDS.get(cell.verdict, "undecided") for cell in result.cells if cell.published is not None)
    return tally


def curves(result: RecipeResult) -> set[str]:
    """Return what the recipe judges: every metric of every run."""
    metrics = {measure.metric for measure in result.recipe.measures.values()}
    return {
        repr([(record["round"], record.get(metric)) for record in run.history])
        for entry in result.runs.values()
        for run in entry.runs
        for metric in metrics
    }


def differing(result: RecipeResult) -> str:
    """Name the claims and numbers that differ."""
    names = [f"*{check.claim.statement}*" for check in result.claims if check.holds is False]
    names += [f"{cell.cell.label}: {cell.measure}" for cell in result.cells if cell.verdict == "differs"]
    return "; ".join(names) or "–"


def table(found: dict[str, RecipeResult]) -> str:
    """Return the counts and a row for every recipe; an experiment that was already judged is not counted again."""
    total, lines, judged = Counter[str](), [], dict[str, str]()
    for name, result in found.items():
        tally, repeated = counts(result), {judged.get(curve, "") for curve in curves(result)}
        for curve in curves(result):
            judged.setdefault(curve, name)
        summary = result.recipe.summary.removesuffix(".")
        if "" in repeated:
            total += tally
        else:
            summary += f" (the runs of {', '.join(sorted(repeated))}, not counted again)"
        numbers = (str(tally[word] or "–") for word in VERDICTS)
        cells = (f"[{name}](results/reproduced/{name}.md): {summary}", *numbers, differing(result))
        lines.append(f"| {' | '.join(cells)} |")
    head = [
        f"{len(found)} of {len(library())} recipes have been run to the end at this scale. Of their claims and "
        f"published numbers {total['agree']} agree, {total['undecided']} are undecided, {total['differ']} differ, and "
        f"{total['unshowable']} cannot be shown at this scale.",
        "",
        "| recipe | agree | undecided | differ | unshowable | what differs |",
        "|---|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*head, *lines])


def main() -> None:
    found = results()
    for name, result in found.items() if sys.argv[1:] else ():
        folder = Path(sys.argv[1])
        page = result_markdown(result, draw_figures(result, folder))
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
