"""Measures the structure of the repository: folders, imports and repeated lines, against the limits the project keeps.

``python tools/house.py`` prints a table and exits 1 where a limit is passed; ``--list`` names each place behind a figure.
It reads the sources as text and runs none of them; it needs nothing but Python.
"""

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("optimizer", "webapp", "worker", "headroom")
"""Packages whose imports are measured."""
MEASURED = (*PACKAGES, "benchmarks", "tests", "tools")
"""Folders whose files are counted and compared for repeated lines; Django's generated migrations are left out."""
LAYERS = (
    "headroom",
    "worker",
    "webapp.pages webapp.api webapp.batches webapp.live webapp.monitoring",
    "webapp.http",
    "webapp.planning",
    "webapp.jobs",
    "webapp.catalog webapp.webhooks",
    "webapp.accounts",
    "webapp.wire",
    "optimizer.cli",
    "optimizer.api",
    "optimizer.search",
    "optimizer.estimate",
    "optimizer.hardware",
    "optimizer.profile",
    "optimizer.runtime",
    "optimizer.models",
    "optimizer.data",
    "optimizer.formats",
    "optimizer.goal",
    "optimizer.plan",
    "optimizer.workload",
    "optimizer.optimizers",
    "optimizer.base",
)
"""From the top down. A module imports from its own layer and from those below."""
MAX_FILES_IN_FOLDER = 15
MAX_CHAIN = 20
MAX_REPEATED_RUNS = 20
RUN_LINES = 6
EXTRAS = ("torch", "transformers", "bitsandbytes", "peft", "torchao", "gguf", "greenlet", "deepspeed", "accelerate", "pynvml")
"""Packages that may be imported inside a function: torch, what takes as long as torch, and optional ones."""

LATE = {
    "headroom.commands.main": "optimizer.cli.main",
    "optimizer.data.samples.parquet_rows": "pyarrow",
    "optimizer.models.build": "huggingface_hub",
    "webapp.catalog.files.check": "tokenizers",
}
"""Modules that import something slow inside a function on purpose: commands that ask the service alone answer half a second
sooner, a limited process loads only the reader of what it was given, and a hub's library is set to stay offline first."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import of a module of the repository or of a package."""

    name: str
    line: int
    is_inside_function: bool


@dataclass(frozen=True, kw_only=True)
class House:
    """Every module of the packages with what it imports."""

    files: Mapping[str, Path]
    """By dotted name, relative to the root."""
    imports: Mapping[str, tuple[Import, ...]]

    @cached_property
    def arrows(self) -> dict[str, set[str]]:
        """By module the modules of the repository that it imports, wherever in the file."""
        return {
            name: {found.name for found in self.imports[name] if found.name in self.files and found.name != name}
            for name in self.files
        }

    @cached_property
    def needs_torch(self) -> set[str]:
        """Modules that import torch, or another of EXTRAS, directly or through others."""
        reached = {
            name
            for name in self.files
            if any(found.name.split(".")[0] in EXTRAS and not found.is_inside_function for found in self.imports[name])
        }
        at_import = {
            name: {found.name for found in self.imports[name] if found.name in self.files and not found.is_inside_function}
            for name in self.files
        }
        while more := {name for name, below in at_import.items() if name not in reached and below & reached}:
            reached |= more
        return reached


def read_house(root: Path = ROOT) -> House:
    files = {_dotted(file): file for file in list_files(root, PACKAGES) if "migrations" not in file.parts}
    return House(files=files, imports={name: tuple(_read_imports(root / file, files)) for name, file in files.items()})


def list_files(root: Path, folders: Iterable[str]) -> list[Path]:
    """Python files below these folders that git knows, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"{folder}/*.py" for folder in folders)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [Path(name) for name in sorted(set(listed)) if (root / name).exists()]


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read_imports(file: Path, files: Mapping[str, Path]) -> Iterator[Import]:
    def walk(node: ast.AST, *, is_inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name=alias.name, line=node.lineno, is_inside_function=is_inside)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(name=full if full in files else node.module, line=node.lineno, is_inside_function=is_inside)
        inside = is_inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_inside=inside)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), is_inside=False)


def count_files_in_folders(root: Path = ROOT) -> Counter[str]:
    """Modules in each folder, without ``__init__.py`` and ``__main__.py``, which say nothing that a reader looks for."""
    files = list_files(root, MEASURED)
    return Counter(
        file.parent.as_posix()
        for file in files
        if file.name not in {"__init__.py", "__main__.py"} and "migrations" not in file.parts
    )


def find_longest_chain(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """The longest way down the imports, one module a step; modules of a circle count as one step each."""
    chains: dict[str, list[str]] = {}
    open_modules: set[str] = set()

    def chain_from(module: str) -> list[str]:
        if module not in chains:
            open_modules.add(module)
            below = [chain_from(other) for other in sorted(arrows[module]) if other not in open_modules]
            open_modules.discard(module)
            chains[module] = [module, *max(below, key=len, default=[])]
        return chains[module]

    return max((chain_from(module) for module in sorted(arrows)), key=len, default=[])


def find_circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules (or rooms) that import one another in a loop (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(arrows[module]):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                circles.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(arrows):
        if module not in order:
            visit(module)
    return circles


def find_folder_circles(house: House) -> list[list[str]]:
    """Circles among the files and folders that one sees side by side on opening a folder; a folder counts as one room."""
    circles = []
    folders = {".".join(name.split(".")[:depth]) for name in house.files for depth in range(1, name.count(".") + 1)}
    for folder in sorted(folders):
        rooms: dict[str, set[str]] = defaultdict(set)
        for name, others in house.arrows.items():
            if (room := _room(name, folder)) is None:
                continue
            rooms[room] |= {other for module in others if (other := _room(module, folder)) not in (None, room)}
        complete = {room: {other for other in others if other in rooms} for room, others in rooms.items()}
        circles += find_circles(complete)
    return circles


def _room(module: str, folder: str) -> str | None:
    """The direct child of a folder that a module lies in, None where it lies elsewhere or is the folder's own face."""
    return f"{folder}.{module[len(folder) + 1 :].split('.')[0]}" if module.startswith(f"{folder}.") else None


def find_imports_upwards(house: House) -> list[str]:
    """Imports from a layer into one above it."""
    found = []
    for name in sorted(house.files):
        own = _layer(name)
        if own is None:
            continue
        for other in sorted(house.arrows[name]):
            layer = _layer(other)
            if layer is not None and layer < own:
                found.append(f"{name} -> {other}")
    return found


def _layer(module: str) -> int | None:
    for index, layer in enumerate(LAYERS):
        if any(module == part or module.startswith(f"{part}.") for part in layer.split()):
            return index
    return None


def find_imports_in_functions(house: House) -> list[str]:
    """Imports inside functions that are not of torch, of what needs torch, or of an optional package.

    ``ready`` of a Django app is left out, since it is called when models may first be imported, and so is what LATE names.
    """
    return [
        f"{house.files[name]}:{found.line} {found.name}"
        for name in sorted(house.files)
        for found in house.imports[name]
        if found.is_inside_function
        and found.name.split(".")[0] not in EXTRAS
        and found.name not in house.needs_torch
        and house.files[name].name != "apps.py"
        and not found.name.startswith(LATE.get(name, "-"))
    ]


def find_repeated_runs(root: Path = ROOT) -> list[str]:
    """Pairs of places that share RUN_LINES or more lines to the letter, without blanks, comments, imports and lone brackets."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    lines = {file: _significant_lines(root / file) for file in list_files(root, MEASURED) if "migrations" not in file.parts}
    for file, kept in lines.items():
        for start in range(len(kept) - RUN_LINES + 1):
            places[tuple(text for _, text in kept[start : start + RUN_LINES])].append((file, start))
    runs = []
    pairs = {(a, b) for starts in places.values() if len(starts) > 1 for a in starts for b in starts if a < b}
    for (file, start), (other, other_start) in sorted(pairs):
        if ((file, start - 1), (other, other_start - 1)) in pairs or (file == other and other_start < start + RUN_LINES):
            continue
        runs.append(f"{file}:{lines[file][start][0]} ~ {other}:{lines[other][other_start][0]}")
    return runs


def _significant_lines(file: Path) -> list[tuple[int, str]]:
    source = file.read_text(encoding="utf-8")
    imports = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    kept = []
    for number, line in enumerate(source.splitlines(), start=1):
        text = " ".join(line.split())
        if number not in imports and any(character.isalnum() for character in text) and not text.startswith("#"):
            kept.append((number, text))
    return kept


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table: a figure, its limit, and the places behind it."""

    name: str
    value: int
    limit: int
    places: list[str]


def measure(root: Path = ROOT) -> list[Figure]:
    house = read_house(root)
    folders = count_files_in_folders(root)
    chain = find_longest_chain(house.arrows)
    listed = {
        "imports that run back up": find_imports_upwards(house),
        "circles of modules": [", ".join(circle) for circle in find_circles(house.arrows)],
        "circles of folders": [", ".join(circle) for circle in find_folder_circles(house)],
        "imports inside functions, not for torch": find_imports_in_functions(house),
    }
    return [
        Figure(
            name="files in the fullest folder",
            value=max(folders.values()),
            limit=MAX_FILES_IN_FOLDER,
            places=[f"{folder} {count}" for folder, count in folders.most_common() if count > MAX_FILES_IN_FOLDER],
        ),
        Figure(name="longest import chain, modules", value=len(chain), limit=MAX_CHAIN, places=chain),
        *(Figure(name=name, value=len(places), limit=0, places=places) for name, places in listed.items()),
        Figure(
            name=f"runs of {RUN_LINES} lines repeated to the letter",
            value=len(runs := find_repeated_runs(root)),
            limit=MAX_REPEATED_RUNS,
            places=runs,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the places behind each figure")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout of the project")
    options = parser.parse_args()
    figures = measure(options.root.resolve())
    for figure in figures:
        verdict = "ok" if figure.value <= figure.limit else "over"
        print(f"{figure.name:42} {figure.value:5}   limit {figure.limit:3}   {verdict}")
        if options.list:
            print("".join(f"    {place}\n" for place in figure.places), end="")
    return int(any(figure.value > figure.limit for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
