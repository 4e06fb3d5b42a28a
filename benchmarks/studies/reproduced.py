"""Write the tables of docs/reproduced.md and the site's list of pages from the results in docs/results/reproduced.

    python benchmarks/studies/reproduced.py [--from FOLDER] [--check]

``--from`` first copies the files that `hansa reproduce --export FOLDER` wrote. ``--check`` only reports whether the
page and the list are those of the results.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hansa.study.recipes.recipe import Recipe, library

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "reproduced"
PAGE, SITE = ROOT / "docs" / "reproduced.md", ROOT / "mkdocs.yml"
MARK = "<!-- table -->"
FIRST = "    - reproduced.md\n"


def counts(record: dict[str, Any]) -> Counter[str]:
    """Count claims and published numbers: how many agree, are undecided, or differ."""
    words = {True: "agree", False: "differ", None: "undecided"}
    tally = Counter(words[claim["holds"]] for claim in record["claims"])
    numbers = {"agrees": "agree", "same order": "agree", "differs": "differ"}
    for number in record["numbers"]:
        if number["published"] is not None:
            tally[numbers.get(number["verdict"], "undecided")] += 1
    return tally


def line(recipe: Recipe, record: dict[str, Any]) -> str:
    """Return the row of a recipe."""
    tally = counts(record)
    differing = [f"*{claim['statement']}*" for claim in record["claims"] if claim["holds"] is False]
    differing += [
        f"{number['row']}{', ' if number['column'] else ''}{number['column']}: {number['measure']}"
        for number in record["numbers"]
        if number["verdict"] == "differs"
    ]
    reduction = record["reduction"].removesuffix(".").replace("|", "\\|") or "nothing"
    cells = (
        f"[{recipe.name}](results/reproduced/{recipe.name}.md): {recipe.summary.removesuffix('.')}",
        reduction,
        *(str(tally[word] or "–") for word in ("agree", "undecided", "differ")),
        "; ".join(differing) or "–",
    )
    return "| " + " | ".join(cells) + " |"


def current_records() -> dict[str, dict[str, Any]]:
    """Return the results by recipe."""
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in library()
        if (path := RESULTS / f"{name}.json").exists()
    }


def tables() -> str:
    """Return the counts and the table of all recipes."""
    current = current_records()
    total = sum((counts(record) for record in current.values()), Counter[str]())
    lines = [
        f"{len(current)} of {len(library())} recipes have been run to the end at this scale: {total['agree']} claims "
        f"and numbers agree, {total['undecided']} are undecided, {total['differ']} differ.",
        "",
        "| recipe | reduction | agree | undecided | differ | what differs |",
        "|---|---|---:|---:|---:|---|",
        *(line(library()[name], record) for name, record in current.items()),
    ]
    return "\n".join(lines)


def site_list() -> str:
    """Return the list of pages for the site."""
    return "".join(f"    - results/reproduced/{name}.md\n" for name in library() if (RESULTS / f"{name}.md").exists())


def written() -> dict[Path, str]:
    """Return the page and the site's configuration as the results make them."""
    before, _, after = PAGE.read_text(encoding="utf-8").split(MARK)
    page = f"{before}{MARK}\n{tables()}\n{MARK}{after}"
    nav = SITE.read_text(encoding="utf-8")
    nav = re.sub(r"    - results/reproduced/[^\n]*\n", "", nav)
    head, rest = nav.split(FIRST)
    return {PAGE: page, SITE: head + FIRST + site_list() + rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--from", dest="source", type=Path, help="Folder of exported results to copy.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail if something would change.")
    arguments = parser.parse_args()
    if arguments.source is not None:
        for name in library():
            if (arguments.source / f"{name}.json").exists():
                for old in (*RESULTS.glob(f"{name}.*"), *RESULTS.glob(f"{name}-*.svg")):
                    if old.suffix == ".svg" and any(other in old.name for other in library() if len(other) > len(name)):
                        continue
                    old.unlink()
                for path in (*arguments.source.glob(f"{name}.*"), *arguments.source.glob(f"{name}-*.svg")):
                    shutil.copy(path, RESULTS / path.name)
    for path, text in written().items():
        if arguments.check and path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} is not that of the results: run {Path(__file__).name} without --check.")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
