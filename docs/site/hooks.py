"""What the site is made of beside its pages: references read off the code, and the project's own files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from equations import with_equations
from packages import PACKAGES

ROOT = Path(__file__).parents[2]
FILES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Files of the project's top folder that are pages of the site."""
TABLE = "<!-- table -->"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of results below the page that introduces them."""
    results = next(entry["Results"] for entry in config.nav or () if "Results" in entry)
    results += [f"results/reproduced/{name}.md" for name in _recipes(config)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not written by hand."""
    for name, page in FILES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_inside(re.sub(r"\]\(docs/", "](", text))))
    files.append(File.generated(config, "reference/cli.md", content=_told("cli")))
    files.append(File.generated(config, "reference/config.md", content=_told("config")))
    with TemporaryDirectory() as folder:
        config.extra["results"] = _told(folder, script="results.py")
        for path in Path(folder).iterdir():
            files.append(File.generated(config, f"results/reproduced/{path.name}", content=path.read_bytes()))
    pages = dict(_api())
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Links from pages to the project's own files, equations, and the table of results."""
    return with_equations(_inside(markdown.replace(TABLE, config.extra["results"])))


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """The theme writes the address of a polyfill as it is; from pages in folders it is further up."""
    return output.replace('src="iframe-worker.js"', f'src="{"../" * page.file.dest_uri.count("/")}iframe-worker.js"')


def _inside(markdown: str) -> str:
    for name, page in FILES.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(name)}", f"]({page}", markdown)
    return re.sub(r"\[([^\]]+)\]\((\.\./)?(LICENSE|NOTICE|README\.md|examples/[^)]*)\)", r"\1", markdown)


def _recipes(config: MkDocsConfig) -> list[str]:
    return sorted(path.stem for path in Path(config.docs_dir, "results", "reproduced").glob("*.json"))


def _told(what: str, script: str = "reference.py") -> str:
    """A reference that the package prints of itself, in a process of its own: the site needs no torch, this does."""
    told = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), what],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return told.stdout


def _api() -> Iterator[tuple[str, str]]:
    packages = [f"- [`hansa.{package}`]({package}.md)" for package in PACKAGES]
    head = "# Python\n\nThe names of the package itself; its packages have pages of their own.\n\n"
    yield "reference/api.md", head + "\n".join(["- [`hansa`](package.md)", *packages]) + "\n"
    for line in _told("names").splitlines():
        page, _, names = line.partition(" ")
        title = "hansa" if page == "package" else f"hansa.{page}"
        yield f"reference/{page}.md", f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names.split()) + "\n"
