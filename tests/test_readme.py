"""Every command and every code block of the README and of all pages is executed, each block as if pasted alone.

Long ones run in a shorter form. The tables below are all there is to it: what a block says is run as it stands, but for
these words. A number in a comment behind an expression is what the expression gives.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import warm

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]

SHORTER_PYTHON = {"rounds=40": "rounds=1", "steps=10": "steps=1"}
"""In Python blocks: fewer rounds and steps."""

INSTEAD = {
    "make demo": ["demo", "--tiny", "--workers", "1", "--quiet"],
    "make test": None,  # this is it
    "pip install 'hansa[ray]'": None,  # the cluster is exercised by tests/e2e
    # the status only: tests/study/recipes/test_recipe.py runs each recipe, and several in one command
    "hansa reproduce hafed --scale smoke": ["reproduce", "hafed", "--scale", "smoke", "--status"],
    "hansa watch runs": None,  # it goes on until Ctrl-C: tests/study/report/test_live.py
}
"""Commands that are run in another form, or not at all."""

QUICK = ["--set", "local.steps=1", "--set", "local.batch_size=10", "--set", "model=logistic", "--set", "workers=1"]
ADDED = {"run": [*QUICK, "--rounds", "2", "--quiet"], "resume": ["--rounds", "3", "--quiet"]}
ADDED |= {name: [*QUICK, "--rounds", "1", "--quiet"] for name in ("compare", "sweep")}
"""What is added to a command to make it quick; the last of two equal options counts."""


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a language on a page; one fenced as ``python`` may not hide as plain text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    languages = ("python", "bash", "yaml", "ini")
    assert all(kind in languages for kind, _ in fences), f"{page}: a fence without a known language"
    return [body for kind, body in fences if kind == language]


def commands(page: str) -> list[str]:
    typed = [block for block in blocks(page, "bash") if not block.startswith("#!")]
    lines = [line.split("  #")[0].strip() for block in typed for line in block.splitlines()]
    return [line for line in lines if line]


def test_scripts_of_pages_are_scripts():
    found = [block for page in PAGES for block in blocks(page, "bash") if block.startswith("#!")]
    assert found
    for block in found:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_block_of_the_page_runs(page, quick):
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner
    from hansa.federation.policy import Policy

    for command in commands(page):
        call(CliRunner(), app, command)
    for block in blocks(page, "yaml"):
        if "kind: RayJob" in block:
            for document in yaml.safe_load_all(block):
                if document["kind"] == "RayJob":
                    assert document["spec"]["entrypoint"].startswith("hansa run ")
            continue
        Path("block.yaml").write_text(block, encoding="utf-8")
        if block.startswith("# policy.yaml"):
            Policy.load("block.yaml")
            continue
        simulated = " --engine pool" if re.search("kind: (flower|ray)", block) else ""
        recipes = "\nrecipes:" in block
        words = "reproduce block.yaml --quiet" if recipes else f"run block.yaml --out runs/block --overwrite{simulated}"
        call(CliRunner(), app, f"hansa {words}")
    programs = [checked(block) for block in blocks(page, "python")]
    if programs:
        Path("blocks.json").write_text(json.dumps(programs), encoding="utf-8")
        Path("page.py").write_text(ALONE, encoding="utf-8")
        execute = subprocess.run if page == "README.md" else warm.run
        done = execute([sys.executable, "-W", "error", "page.py"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


ALONE = """
import json
from pathlib import Path

for number, block in enumerate(json.loads(Path("blocks.json").read_text(encoding="utf-8"))):
    exec(compile(block, f"block {number}", "exec"), {"__name__": "__main__"})
"""


def checked(block: str) -> str:
    """The block in its shorter form, with what its comments claim of an expression's value as assertions."""
    for long, short in SHORTER_PYTHON.items():
        block = block.replace(long, short)
    lines = block.splitlines()
    for node in ast.parse(block).body:
        claimed = re.search(r"  # (-?\d+(?:\.(\d+))?)$", lines[node.end_lineno - 1])
        if isinstance(node, ast.Expr) and claimed:
            close = 0.51 * 10 ** -len(claimed[2] or "")
            lines.append(f"assert abs(({ast.unparse(node)}) - {claimed[1]}) <= {close}, {ast.unparse(node)!r}")
    return "\n".join(lines)


def test_the_first_lines_of_python_need_no_extra():
    program = blocks("README.md", "python")[0]
    for long, short in SHORTER_PYTHON.items():
        program = program.replace(long, short)
    absent = "import sys\nfor name in ('matplotlib', 'optuna', 'mlflow', 'tensorboard'): sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-c", absent + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["round", "test_accuracy", "up_bytes"]


def call(runner, app, command):
    """Run one command line of a page."""
    if command in INSTEAD:
        words = INSTEAD[command]
        if words is None:
            return
    else:
        line, _, target = command.partition(" > ")
        program, *words = shlex.split(re.sub(r" --engine ray| --address \S+| --workers 64", "", line))
        assert program == "hansa", f"{command}: say in INSTEAD how this is run"
        if "config.yaml" in words and not Path("config.yaml").exists():  # the reader's own
            Path("config.yaml").write_text("rounds: 2\n", encoding="utf-8")
        words = [*words, *ADDED.get(words[0], [])]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, f"{command}: {result.output}"
    if command not in INSTEAD and target:
        Path(target).write_text(result.stdout, encoding="utf-8")


def test_links_and_pictures_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                path = (ROOT / page).parent / target
                # the page of a result is made of its numbers when the site is built
                assert path.exists() or path.with_suffix(".json").exists(), f"{page} points to {target}"
