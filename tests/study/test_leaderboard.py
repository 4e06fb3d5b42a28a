"""Entries of the leaderboard: made from runs, checked, ranked; what was tampered with is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hansa.core.errors import HansaError
from hansa.runs.folder import RunFolder
from hansa.study.leaderboard import collect_entry, leaderboard_page, read_entry, write_entry
from hansa.study.leaderboard.entry import recipe_digest, seal_of
from hansa.study.leaderboard.page import _table, rank_rows
from hansa.study.recipes import library
from hansa.study.recipes.reading import read_measure
from hansa.study.recipes.recipe import RecipeMeasure

DOCS = Path(__file__).parents[2] / "docs"
ENTRIES = sorted((DOCS / "leaderboard").glob("*.json"))
HEART = DOCS / "leaderboard" / "flamby-heart-disease.json"


@pytest.fixture
def content() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(HEART.read_text())
    return loaded


def refusal(content: dict[str, Any], tmp_path: Path, *, sealed: bool = True) -> str:
    """The message with which an entry is refused, with a seal that fits or with the old one."""
    if sealed:
        content = {**content, "sha256": seal_of(content)}
    path = tmp_path / "entry.json"
    path.write_text(json.dumps(content))
    with pytest.raises(HansaError) as caught:
        read_entry(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_the_page_is_that_of_the_entries_beside_it() -> None:
    entries = [read_entry(path) for path in ENTRIES]
    assert len(entries) >= 3
    assert (DOCS / "leaderboard.md").read_text() == leaderboard_page(entries)
    assert leaderboard_page(entries[::-1]) == leaderboard_page(entries)


def test_a_number_that_was_changed_breaks_the_seal(content: dict[str, Any], tmp_path: Path) -> None:
    assert read_entry(HEART).sha256 == seal_of(content)
    content["rows"][0]["seeds"][0]["values"]["accuracy"] += 0.1
    message = refusal(content, tmp_path, sealed=False)
    assert "sha256 is" in message
    assert "hansa leaderboard entry" in message


CHANGES = {
    "hash of the configuration": (
        lambda c: c["rows"][0].update(config_sha256="0" * 64),
        ["config_sha256 is 000000000000", "Write the entry again"],
    ),
    "a rate that was not run": (
        lambda c: c["rows"][0]["config"]["local"].update(lr=0.5),
        ["config_sha256 is", "not the one that was run"],
    ),
    "another recipe": (lambda c: c.update(recipe="flamby-hart-disease"), ["Did you mean flamby-heart-disease"]),
    "an older recipe": (lambda c: c.update(recipe_sha256="1" * 64), ["recipe_sha256 is 111111111111", "Run `hansa"]),
    "a seed left out": (lambda c: c["rows"][1]["seeds"].pop(), ["it has the seeds [0, 1, 2, 3]", "[0, 1, 2, 3, 4]"]),
    "a seed copied": (
        lambda c: c["rows"][1]["seeds"][1].update(model_sha256=c["rows"][1]["seeds"][0]["model_sha256"]),
        ["two seeds have the same model"],
    ),
    "a measure left out": (lambda c: c["rows"][0]["seeds"][2]["values"].popitem(), ["seed 2", "is missing. Expected"]),
    "a value that is none": (
        lambda c: c["rows"][0]["seeds"][0]["values"].update(accuracy="high"),
        ["rows.0.seeds.0.values.accuracy is 'high'", "valid number"],
    ),
    "no hardware": (lambda c: c.pop("hardware"), ["hardware: Field required", "writes all fields"]),
    "no cores": (lambda c: c["hardware"].pop("cores"), ["hardware.cores: Field required"]),
    "no time": (lambda c: c["rows"][0]["seeds"][0].pop("seconds"), ["rows.0.seeds.0.seconds: Field required"]),
    "a field of its own": (lambda c: c.update(rank=1), ["rank is 1", "Extra inputs are not permitted"]),
    "a script": (lambda c: c.update(title="<script>"), ["title is '<script>'", "should match pattern"]),
    "an address that is code": (lambda c: c.update(url="javascript:x"), ["url is 'javascript:x'"]),
    "other data": (
        lambda c: c["rows"][2]["seeds"][0].update(data_sha256="2" * 64),
        ["data_sha256 is", "such rows cannot be compared"],
    ),
    "another partition": (
        lambda c: c["rows"][2]["seeds"][0].update(partition_sha256="2" * 64),
        ["partition_sha256 is 222222222222", "for the same setting", "such rows cannot be compared"],
    ),
    "more than everything": (
        lambda c: c["rows"][0]["seeds"][0]["values"].update(accuracy=137.0),
        ["accuracy is 137: expected 0 to 100"],
    ),
    "less than nothing": (
        lambda c: c["rows"][0]["seeds"][0]["values"].update(accuracy=-0.5),
        ["accuracy is -0.5: expected 0 to 100"],
    ),
    "a target that is none": (
        lambda c: c["rows"][0]["seeds"][0].update(not_reached=["accuracy"]),
        ["'accuracy' has no target"],
    ),
    "a row twice": (lambda c: c["rows"].append(c["rows"][0]), ["is there twice"]),
    "no such column": (lambda c: c["rows"][0].update(column="x"), ["column 'x'", "no such column"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_tampered_with_is_refused_with_the_value_and_the_remedy(
    content: dict[str, Any], tmp_path: Path, change: str
) -> None:
    """Even by somebody who computes the seal anew."""
    tamper, expected = CHANGES[change]
    tamper(content)
    message = refusal(content, tmp_path)
    for part in expected:
        assert part in message


def with_digest(row: dict[str, Any]) -> None:
    from hansa.config import from_yaml
    from hansa.runs.experiment import config_digest

    row["config_sha256"] = config_digest(from_yaml(json.dumps(row["config"]), building=False))


def test_another_setting_cannot_be_compared(content: dict[str, Any], tmp_path: Path) -> None:
    row = content["rows"][0]
    for changes in ({"rounds": 10 * row["config"]["rounds"]}, {"evaluate": {"every": 3}}):
        changed = copy.deepcopy(content)
        changed["rows"][0]["config"].update(changes)
        with_digest(changed["rows"][0])
        assert "are not those of flamby-heart-disease" in refusal(changed, tmp_path)


def test_seeds_that_were_chosen_cannot_be_compared(content: dict[str, Any], tmp_path: Path) -> None:
    row, chosen = content["rows"][0], [3, 8, 21, 34, 55]
    row["config"]["seeds"] = chosen
    with_digest(row)
    for one, seed in zip(row["seeds"], chosen, strict=True):
        one["seed"] = seed
    assert "chosen seeds cannot be compared. Run it with --seeds 5, which are 0 to 4" in refusal(content, tmp_path)


def test_entries_of_other_data_are_not_on_one_page(content: dict[str, Any], tmp_path: Path) -> None:
    content["rows"] = content["rows"][:1]
    for one in content["rows"][0]["seeds"]:
        one["data_sha256"] = "4" * 64
    write_entry(content, tmp_path / "other.json")  # by itself nothing is wrong with it
    (tmp_path / "heart.json").write_text(HEART.read_text())
    checked = called("leaderboard", "check", str(tmp_path))
    assert checked.exit_code == 1
    assert "data_sha256 is 444444444444" in " ".join(checked.stderr.split())
    assert called("leaderboard", "build", str(tmp_path), "-o", str(tmp_path / "page.md")).exit_code == 2
    assert not (tmp_path / "page.md").exists()


def test_a_row_that_did_not_reach_the_target_is_not_before_one_that_did() -> None:
    measure = RecipeMeasure(statistic="hours_to", target=0.8, factor=1, smaller_is_better=True)
    entry = read_entry(HEART)
    rows = []
    for row, hours, reached in zip(entry.rows, (50.0, 60.0, 40.0), (False, True, True), strict=False):
        missed = () if reached else ("hours",)
        seeds = [
            one.model_copy(update={"values": {"hours": hours + one.seed}, "not_reached": missed}) for one in row.seeds
        ]
        rows.append((row.model_copy(update={"row": f"{hours:g}", "seeds": tuple(seeds)}), entry))
    ranked = rank_rows(rows, "hours", measure)
    assert [(place.row.row, place.reached) for place in ranked] == [("40", True), ("60", True), ("50", False)]
    lines = list(_table("", "hours", measure, ranked))
    assert "50 (target not reached by all seeds) | over 52" in lines[-1]


def test_what_a_run_did_not_reach_is_in_its_entry(tmp_path: Path) -> None:
    recipe = library()["afga-table-7"]
    done = called("reproduce", recipe.name, "--scale", "smoke", "--out", str(tmp_path), "--workers", "1", "--quiet")
    assert done.exit_code == 0, done.output
    content = collect_entry(recipe, "smoke", tmp_path / "smoke" / "runs", title="T", authors=["A"])
    runs = {run.config.title: run for run in map(RunFolder, (tmp_path / "smoke" / "runs").glob("*/seed-0"))}
    for row in content["rows"]:
        history, first = runs[row["row"]].history, row["seeds"][0]
        measures = recipe.measured("smoke").items()
        missed = {name for name, measure in measures if read_measure(history, measure) is None}
        assert {*first.get("not_reached", ())} == missed
        assert missed  # two rounds


def test_another_method_in_the_same_setting_takes_its_place(content: dict[str, Any], tmp_path: Path) -> None:
    from hansa.config import from_yaml
    from hansa.runs.experiment import config_digest

    own = copy.deepcopy(content)
    own.update(title="Mine", authors=["A. Name"], url="https://example.org/mine", rows=[own["rows"][0]])
    row = own["rows"][0]
    row["row"] = "My | method"
    row["config"]["local"]["lr"] = 0.123
    row["config_sha256"] = config_digest(from_yaml(json.dumps(row["config"]), building=False))
    for one in row["seeds"]:
        one["values"]["accuracy"] = 99.0 + one["seed"] / 10
    with pytest.raises(HansaError, match="row is"):  # a bar would break the table
        write_entry(own, tmp_path / "mine.json")
    row["row"] = "My method"
    mine = write_entry(own, tmp_path / "mine.json")
    assert read_entry(tmp_path / "mine.json") == mine
    page = leaderboard_page([read_entry(HEART), mine])
    board = page[page.index("## flamby-heart-disease") :]
    first = next(line for line in board.splitlines() if line.startswith("| 1 |"))
    assert "My method | 99.2 ± 0.16 | 99 to 99.4 | 5" in first
    assert "[Mine](https://example.org/mine)" in page


def test_a_recipe_of_other_cells_or_measures_has_another_digest() -> None:
    recipe = library()["cams-figure-4"]
    texts = recipe.model_copy(update={"summary": "said otherwise"})
    fewer = recipe.model_copy(update={"rows": dict(list(recipe.rows.items())[:1])})
    assert recipe_digest(texts, "cpu") == recipe_digest(recipe, "cpu") != recipe_digest(fewer, "cpu")


def called(*arguments: str) -> Any:
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [*arguments])


def test_an_entry_has_what_the_run_folders_have(tmp_path: Path) -> None:
    recipe = library()["flamby-heart-disease"]
    facts = {"title": "T", "authors": ["A"]}
    with pytest.raises(HansaError, match=r"there is no finished run. `hansa reproduce flamby-heart-disease"):
        collect_entry(recipe, "smoke", tmp_path / "smoke" / "runs", **facts)
    done = called("reproduce", recipe.name, "--scale", "smoke", "--out", str(tmp_path), "--workers", "1", "--quiet")
    assert done.exit_code == 0, done.output
    content = collect_entry(recipe, "smoke", tmp_path / "smoke" / "runs", **facts)
    assert [(row["row"], row["column"]) for row in content["rows"]] == [
        (cell.row, cell.column) for cell in recipe.cells("smoke")
    ]
    folders = {run.config.title: run for run in map(RunFolder, (tmp_path / "smoke" / "runs").glob("*/seed-0"))}
    for row in content["rows"]:
        run, first = folders[row["row"]], row["seeds"][0]
        assert first["bits"] == run.summary["bits"]
        assert first["model_sha256"] == run.summary["model_sha256"]
        assert first["data_sha256"] == run.data_facts["data"]
        assert first["values"]["accuracy"] == pytest.approx(100 * run.history[-1]["test_accuracy"])
    with pytest.raises(HansaError, match="scale is 'smoke'"):  # nothing to compare
        write_entry(content, tmp_path / "entry.json")


def test_the_commands_check_and_build(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({**content, "title": "Better"}))
    (tmp_path / "good.json").write_text(HEART.read_text())
    checked = called("leaderboard", "check", str(tmp_path))
    assert checked.exit_code == 1
    assert "good.json: Reproduction at scale cpu: flamby-heart-disease, 10 rows" in checked.stdout
    assert "refused:" in checked.stderr
    assert called("leaderboard", "build", str(tmp_path), "-o", str(tmp_path / "page.md")).exit_code == 2
    assert not (tmp_path / "page.md").exists()
    (tmp_path / "bad.json").unlink()
    assert called("leaderboard", "build", str(tmp_path), "-o", str(tmp_path / "page.md")).exit_code == 0
    assert (tmp_path / "page.md").read_text() == leaderboard_page([read_entry(HEART)])
