"""Assembles the documentation as one folder of Markdown, with an API reference of the packages as they are, for ``make docs``.

    python tools/docs.py FOLDER

``FOLDER/pages`` gets the pages of ``docs/``, the repository's own (README, CONTRIBUTING, CHANGELOG), and one page of reference
for each folder with modules: its README, then every module by its path with the docstrings of what it has. So a module that
moves needs no edit here. ``FOLDER/zensical.toml`` says how the site is built from them.

Links that point out of the documentation, to code or results, become their text with the path beside it. Needs nothing but
Python: the packages that render pages are in the extra ``docs``.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("optimizer", "headroom", "webapp", "worker")
LEFT_OUT = frozenset({"__init__", "__main__", "manage"})
CHAPTERS = (
    ("Start", "README.md"),
    ("Map", "docs/architecture.md"),
    ("Library", "docs/library.md"),
    ("Models", "docs/models.md"),
    ("Techniques", "docs/techniques.md"),
    ("The decoder", "docs/decoder.md"),
    ("Devices", "docs/devices.md"),
    ("Access", "docs/access.md"),
    ("Promises", "docs/promises.md"),
    ("Security", "docs/security.md"),
    ("Configuration", "docs/configuration.md"),
    ("Decisions", "docs/decisions/README.md"),
    ("Experiments", "docs/experiments.md"),
    ("Contributing", "CONTRIBUTING.md"),
    ("Changes", "CHANGELOG.md"),
)
"""Chapters of the site and their first pages; the API reference follows them. Pages of no other chapter stand under the map."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_SETTINGS = """\
# Made by tools/docs.py; do not edit.
[project]
site_name = "Headroom"
site_description = "Makes large-model training and generation fit, and run fast, on the GPU you have."
docs_dir = "pages"
site_dir = "site"
nav = {nav}

[project.theme]
# nothing is loaded from another host
font = false
features = ["navigation.prune", "navigation.top", "search.highlight", "content.code.copy"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"

[project.plugins.mkdocstrings.handlers.python]
paths = [{root}]

[project.plugins.mkdocstrings.handlers.python.options]
show_source = false
show_root_heading = false
show_root_toc_entry = false
show_if_no_docstring = true
heading_level = 3
members_order = "source"
separate_signature = true
show_signature_annotations = true
filters = ["!^_"]
"""


def main(folder: Path) -> None:
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    names = {source: _page_of(source) for source in list_sources()}
    for source, page in names.items():
        _write(pages / page, link_pages((ROOT / source).read_text(), source, names))
        _copy_pictures(source, pages)
    chapters: list[object] = [{title: _in_chapter(title, names)} for title in dict(CHAPTERS)]
    folders = list_code_folders()
    for path in folders:
        _write(pages / f"reference/{path}.md", reference_page(path))
    by_package = {package: [path for path in folders if path.split("/")[0] == package] for package in PACKAGES}
    reference = [{package: [{path: f"reference/{path}.md"} for path in paths]} for package, paths in by_package.items()]
    chapters.append({"API reference": reference})
    settings = _SETTINGS.format(nav=_toml(chapters), root=json.dumps(str(ROOT)))
    (folder / "zensical.toml").write_text(settings)


def list_sources() -> list[str]:
    """Markdown files of the documentation, by their paths in the repository."""
    own = {first for _, first in CHAPTERS}
    return sorted(own | {file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md")})


def list_code_folders() -> list[str]:
    """Folders with modules, by their paths in the repository, packages in order."""
    return [
        folder.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for folder in sorted([ROOT / package, *(ROOT / package).rglob("*/")])
        if list_modules(folder)
    ]


def list_modules(folder: Path) -> list[str]:
    """Names of a folder's modules, without migrations and without what only starts or marks a package."""
    if not (folder / "__init__.py").exists() or folder.name == "migrations":
        return []
    return sorted(file.stem for file in folder.glob("*.py") if file.stem not in LEFT_OUT)


def reference_page(path: str) -> str:
    """The page of one folder: its README's text or the package's docstring, then its modules."""
    readme = ROOT / path / "README.md"
    lines = [f"# {path}/", ""]
    if readme.exists():
        body = re.sub(r"\A#[^\n]*\n+", "", readme.read_text())
        lines += [link_pages(body, f"{path}/README.md", {}), ""]
    for name in list_modules(ROOT / path):
        lines += [f"## {path}/{name}.py", "", f"::: {path.replace('/', '.')}.{name}", ""]
    return "\n".join(lines)


def link_pages(text: str, source: str, names: dict[str, str]) -> str:
    """Point links between pages at the site's pages; links to other files become their text with the path."""

    def replaced(match: re.Match[str]) -> str:
        is_picture, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = os.path.normpath(f"{Path(source).parent.as_posix()}/{target}")
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source} links to {target}, which is not there")
        if path in names:
            return f"[{label}]({os.path.relpath(names[path], Path(names[source]).parent)}{anchor})"
        if is_picture:
            return f"![{label}]({os.path.relpath(_picture_of(path), Path(names[source]).parent)})"
        return label if path in label else f"{label} (`{path}`)"

    return _LINK.sub(replaced, text)


def _page_of(source: str) -> str:
    """The page of a source: the README is the first one, a folder's README its index."""
    if source == "README.md":
        return "index.md"
    page = source.removeprefix("docs/")
    return page.replace("README.md", "index.md") if page.endswith("/README.md") else page.lower() if "/" not in page else page


def _in_chapter(title: str, names: dict[str, str]) -> object:
    """A chapter's page or, of the decisions and of the map, pages."""
    first = names[dict(CHAPTERS)[title]]
    decisions = [page for page in names.values() if page.startswith("decisions/")]
    if title == "Decisions":
        return [first, *(page for page in decisions if page != first)]
    if title == "Map":
        placed = {*decisions, *(names[source] for source in dict(CHAPTERS).values())}
        return [first, *(page for page in names.values() if page not in placed)]
    return first


def _picture_of(path: str) -> str:
    return f"pictures/{Path(path).name}"


def _copy_pictures(source: str, pages: Path) -> None:
    for picture, _, target, _ in _LINK.findall((ROOT / source).read_text()):
        if picture and "://" not in target:
            path = os.path.normpath(f"{Path(source).parent.as_posix()}/{target}")
            copy = pages / _picture_of(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _toml(value: object) -> str:
    """Lists of strings and of tables with one key, as TOML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
