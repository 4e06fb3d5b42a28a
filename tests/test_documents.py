"""The README, pages, site and docstrings: every command and code block runs, each block as if pasted alone.

Long ones run in a shorter form. The tables below are all there is to it: what a block says is run as it stands, but for
these words. A number in a comment behind an expression is what the expression gives.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import warm
from command_line import run_command
from hansa.federation.policy import Policy

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
    for command in commands(page):
        call(command)
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
        call(f"hansa {words}")
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


def call(command):
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
    result = run_command(*words)
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


SITE = ROOT / "docs" / "site"
sys.path.insert(0, str(SITE))
equations, reference, results = map(importlib.import_module, ("equations", "reference", "results"))


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in pages_of(item)]  # type: ignore[attr-defined, union-attr]


def told(what: str) -> str:
    run = subprocess.run([sys.executable, SITE / "reference.py", what], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def navigation() -> list[str]:
    return pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    written = {page.name for page in docs.glob("*.md")} - {"paper.md"}  # whose citations need pandoc
    made = {"contributing.md", "security.md", "changelog.md"}
    named = [page for page in navigation() if not page.startswith("reference/")]
    assert sorted(named) == sorted(written | made)


def test_results_are_counted_by_the_present_rules_and_readme_states_the_counts() -> None:
    found = results.results()
    head, _, *_ = results.table(found).splitlines()
    numbers = re.findall(r"(\d+) (?:agree|are undecided|differ|cannot be shown)", head)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert re.findall(r"(\d+) (?:numbers and claims agree|are undecided|differ|cannot be shown)", readme) == numbers
    cams = {name: results.curves(found[name]) for name in ("cams-figure-1", "cams-figure-8", "cams-figure-2")}
    assert cams["cams-figure-1"] == cams["cams-figure-8"] != cams["cams-figure-2"]
    lines = {
        name: line for line in results.table(found).splitlines() for name in cams if line.startswith(f"| [{name}]")
    }
    assert [name for name, line in lines.items() if "not counted again" in line] == ["cams-figure-8"]


def test_every_room_of_the_reference_is_in_the_navigation() -> None:
    listed = {line.split()[0] for line in told("names").splitlines()} | {"cli", "config", "api"}
    assert {page for page in navigation() if page.startswith("reference/")} == {f"reference/{one}.md" for one in listed}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cli", ["## hansa run", "## hansa data list", "`--seeds`", "## hansa reproduce"]),
        ("config", ["## local", "| `batch_size` |", "## evaluate"]),
        ("names", ["hansa.presets.fedcams", "hansa.compress.sign", "hansa.Task"]),
    ],
)
def test_references_are_read_off_the_code(what: str, words: list[str]) -> None:
    text = told(what)
    for word in words:
        assert word in text


def test_equations_are_converted_and_code_is_left_alone() -> None:
    text = "rate $O(1/\\sqrt{T})$, cost $5, `$x$`\n\n```bash\necho $HOME $y$\n```\n\n$$a_i$$\n"
    result = equations.with_equations(text, lambda latex, display: f"<{display} {latex}>")
    assert "rate <inline O(1/\\sqrt{T})>, cost $5, `$x$`" in result
    assert "echo $HOME $y$" in result
    assert "<block a_i>" in result


NEEDS_AN_EXTRA = {"hansa.search"}
"""Whose examples cannot run with what the suite installs; they have tests of their own that say so."""

PUBLIC = sorted({name for line in reference.names() for name in line.split()[1:]})


@pytest.mark.parametrize("name", PUBLIC)
def test_has_a_docstring_with_an_example(name: str) -> None:
    assert len(PUBLIC) > 250
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    text = inspect.getdoc(value)
    assert text, f"{name} has no docstring"
    protocol = getattr(value, "_is_protocol", False)  # docs/own-parts.md has an example of each
    assert ">>> " in text or protocol or name in NEEDS_AN_EXTRA, f"{name} has no example"


COMPONENTS = ("presets", "algorithm", "server", "aggregate", "compress", "gossip", "sample", "pace")


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if name.split(".")[1] in COMPONENTS and name.split(".")[2].islower()]
)
def test_documents_every_argument(name: str) -> None:
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    listed = (inspect.getdoc(value) or "").partition("Args:")[2]
    for argument in inspect.signature(value).parameters:
        assert f" {argument}: " in listed.replace("*", ""), f"{name} does not document {argument}"


TYPED = ("README.md", "docs/own-parts.md")
OPAQUE = (
    "PIL", "matplotlib", "networkx", "rich", "scipy", "yaml",
    *(f"torch.{name}" for name in (
        "_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_library", "_logging",
        "_meta_registrations", "_numpy", "_prims", "_prims_common", "_refs", "_subclasses", "accelerator", "ao",
        "backends", "compiler", "cuda", "distributed", "distributions", "export", "fx", "jit", "masked", "mtia",
        "nested", "onnx", "package", "profiler", "testing", "utils._sympy", "xpu",
    )),
)  # fmt: skip
"""Packages whose insides are not read: no type of an example comes from them, and they are most of the work."""


def test_the_examples_and_the_code_on_the_pages_are_typed(tmp_path, monkeypatch) -> None:
    api = pytest.importorskip("mypy.api")
    files = []
    for page in TYPED:
        for number, block in enumerate(blocks(page, "python")):
            files.append(tmp_path / f"{Path(page).stem.lower().replace('-', '_')}_{number}.py")
            files[-1].write_text(block, encoding="utf-8")
    assert len(files) >= 20
    examples = sorted(path for path in (ROOT / "examples").rglob("*.py"))
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    settings = tmp_path / "mypy.ini"
    modules = ",".join(f"{name}.*" for name in OPAQUE)
    settings.write_text(f"[mypy]\n[mypy-{modules}]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n")
    options = [
        "--strict",
        "--allow-untyped-defs",  # as people write models
        "--allow-incomplete-defs",
        "--allow-untyped-calls",
        f"--config-file={settings}",
        "--follow-imports=silent",
        "--no-error-summary",
        "--explicit-package-bases",
    ]
    options += ["--ignore-missing-imports", "--cache-dir", str(ROOT / ".mypy_cache" / "pages"), "--python-executable"]
    report, problems, _ = api.run([*options, sys.executable, *map(str, [*files, *examples])])
    assert not problems
    wrong = [line.replace(str(tmp_path), "") for line in report.splitlines() if ": error:" in line]
    assert not wrong, "\n".join(wrong)
