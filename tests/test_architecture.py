"""The packages import, call and read only what rules allow that no linter here knows."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("optimizer", "webapp", "worker", "headroom", "benchmarks")
TORCH_PLACES = ("optimizer/models/", "optimizer/profile/", "optimizer/hardware/probe", "optimizer/runtime/")
"""Folders that may import torch; in the first two only the modules that build and trace."""
TORCH_FREE = (
    "optimizer.plan.plan",
    "optimizer.estimate.training",
    "optimizer.estimate.generation.pricing",
    "optimizer.search.search",
    "optimizer.workload",
    "optimizer.hardware.machine",
    "optimizer.hardware.calibration",
    "optimizer.profile.profile",
    "optimizer.models.spec",
    "optimizer.models.presets",
    "optimizer.models.files.check_weights",
    "optimizer.data.inspect",
    "optimizer.data.batches",
    "webapp.asgi",
    "webapp.urls",
    "worker.app",
    "worker.supervisor",
    "worker.reconciler",
    "headroom.commands.main",
    "worker.stack.supervisor",
)
KNOWN_OVER = {"longest import chain, modules": 22}
"""Figures of ``tools/house.py`` that are over its limit, and may not grow."""
FORBIDDEN_CALLS = {"torch.load", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "os.system", "eval", "exec"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve"}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 50
    return [(file.relative_to(ROOT).as_posix(), ast.parse(file.read_text())) for file in files]


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute chain, else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def calls_of(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    return ((dotted(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_import_arrows_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_house_keeps_its_limits() -> None:
    """Folders, the longest import chain, circles and repeated lines, as ``python tools/house.py`` prints them."""
    done = subprocess.run([sys.executable, "tools/house.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    rows = dict(re.findall(r"^(.+?) +(\d+ +limit +\d+)", done.stdout, flags=re.M))
    assert len(rows) == 7, done.stdout + done.stderr
    figures = {name: [int(number) for number in re.findall(r"\d+", row)] for name, row in rows.items()}
    over = {name: value for name, (value, limit) in figures.items() if value > max(limit, KNOWN_OVER.get(name, 0))}
    assert over == {}


def test_torch_is_imported_only_where_there_are_tensors() -> None:
    found = [
        f"{file}:{line}"
        for file, tree in sources()
        for name, line in imports_of(tree)
        if name.split(".")[0] == "torch" and not file.startswith((*TORCH_PLACES, "benchmarks/"))
    ]
    assert found == []


def test_only_the_worker_knows_the_worker_and_the_library_knows_no_django() -> None:
    found = [
        f"{file}:{line} {name}"
        for file, tree in sources()
        for name, line in imports_of(tree)
        if (file.startswith("webapp/") and name.split(".")[0] == "worker")
        or (file.startswith("optimizer/") and name.split(".")[0] in {"webapp", "worker", "django", "celery", "redis"})
    ]
    assert found == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_brings_no_torch(module: str) -> None:
    """The process is a fresh one, so that imports inside other modules count and those of other tests do not."""
    code = (
        "import os, sys\n"
        "os.environ['DJANGO_SETTINGS_MODULE'] = 'webapp.settings'\n"
        f"if {module!r}.startswith(('webapp', 'worker.app', 'worker.supervisor', 'worker.reconciler')):\n"
        "    import django; django.setup()\n"
        f"import {module}\n"
        "print(sorted({'torch', 'transformers', 'bitsandbytes'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr[-2000:]) == ("[]\n", "")


def test_no_forbidden_call() -> None:
    found = [
        f"{file}:{node.lineno} {name}"
        for file, tree in sources()
        for name, node in calls_of(tree)
        if name in FORBIDDEN_CALLS
    ]
    assert found == []


def test_no_module_that_can_run_code_while_it_reads() -> None:
    found = [
        f"{file}:{line} {name}"
        for file, tree in sources()
        for name, line in imports_of(tree)
        if name.split(".")[0] in FORBIDDEN_IMPORTS
    ]
    assert found == []


def test_no_command_goes_through_a_shell() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, tree in sources()
        for _, node in calls_of(tree)
        for keyword in node.keywords
        if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    assert found == []


def test_no_text_is_declared_safe_for_html() -> None:
    python = [
        f"{file}:{line}"
        for file, tree in sources()
        for name, line in imports_of(tree)
        if name.endswith(("mark_safe", "SafeText"))
    ]
    templates = [
        file.relative_to(ROOT).as_posix()
        for file in sorted((ROOT / "webapp").rglob("*.html"))
        if re.search(r"\|\s*safe\b|{%\s*autoescape\s+off", file.read_text())
    ]
    assert python + templates == []


def test_every_variable_that_is_read_is_documented() -> None:
    documented = set(re.findall(r"`((?:HEADROOM_)[A-Z_]+|DATABASE_URL|REDIS_URL)`", (ROOT / "docs/configuration.md").read_text()))
    read = {
        argument.value
        for _, tree in sources()
        for name, node in calls_of(tree)
        if name.startswith(("env.", "os.environ.", "os.getenv", "_number"))
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        if re.fullmatch(r"HEADROOM_[A-Z_]+|DATABASE_URL|REDIS_URL", argument.value)
    }
    assert len(read) > 10
    assert read <= documented
    # and nothing is documented that is not there
    text = "".join((ROOT / file).read_text() for file, _ in sources())
    assert [name for name in sorted(documented) if name not in text] == []


def tracked_text() -> Iterator[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in names:
        file = ROOT / name
        if name and file.is_file() and "/vendor/" not in name and file.stat().st_size < 2_000_000:
            try:
                yield name, file.read_text()
            except UnicodeDecodeError:
                continue


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    # the folder around this copy names the machine, unless every machine has it
    own = ROOT if ROOT.parent.as_posix() in ("/", "/opt", "/srv", "/tmp", "/var/tmp") else ROOT.parent
    pattern = re.compile(r"/(?:home|Users|root)/[A-Za-z0-9._-]+/|" + re.escape(str(own)) + "/")
    found = [name for name, text in tracked_text() if pattern.search(text)]
    assert found == []


def test_the_lock_names_no_package_index() -> None:
    for lock in ("requirements.lock", "requirements-test.lock"):
        lines = (ROOT / lock).read_text().splitlines()
        assert [line for line in lines if "://" in line or line.startswith("--") or "file:" in line] == []


def test_every_locked_package_has_a_hash_and_torch_is_not_among_them() -> None:
    for lock in ("requirements.lock", "requirements-test.lock"):
        entries = re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", (ROOT / lock).read_text(), flags=re.M | re.S)
        assert entries
        assert all("--hash=sha256:" in entry for entry in entries)
        names = {re.split(r"[=\s\[]", entry)[0] for entry in entries}
        assert not {name for name in names if name == "torch" or name.startswith("nvidia-cu") or name == "triton"}


def test_every_dependency_of_the_project_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {
        re.split(r"[=\s]", line)[0]
        for lock in ("requirements.lock", "requirements-test.lock")
        for line in (ROOT / lock).read_text().splitlines()
        if re.match(r"[a-z0-9]", line)
    }
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - locked == {"torch"}
