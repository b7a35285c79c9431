"""Settings and fixtures of all tests: no progress bars or downloads from libraries, one thread for torch, one profile of a tiny
model, one PostgreSQL.
"""

import fcntl
import functools
import gc
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from optimizer.profile.profile import Profile
from optimizer.runtime.compiled.kernel_cache import keep_kernels_in
from tests import llama, prepared
from tests.postgresql import running_postgresql
from tests.worker import machines

pytest_plugins = ["tests.breadth", "tests.left_out"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside other processes of this run: more threads, in those that tests start as well, would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All tests and what they import live as long as this process. Looking for garbage among them took a third of the processor
    time of the tests that run in it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _shared_between_processes(pytestconfig: pytest.Config) -> None:
    """Share what takes long to make and is not under test: a machine's measured rates, an empty database, the pages' files as
    they are served, machine code of compiled blocks.
    """
    root = _kept_folder(pytestconfig)
    os.environ.setdefault(machines.FOLDER_VARIABLE, str(root / "machines"))
    os.environ.setdefault(prepared.FOLDER_VARIABLE, str(root / "prepared"))
    keep_kernels_in(root / "kernels")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Bitwise comparisons must not depend on how sums are split over threads. Does not import torch by itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HEADROOM_HOME for what reads it from the environment."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HEADROOM_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def llama_folder(pytestconfig: pytest.Config) -> Path:
    """config.json, and profile.json as the profile command writes it: traced once, because that takes seconds."""
    if llama.FOLDER_VARIABLE in os.environ:
        return Path(os.environ[llama.FOLDER_VARIABLE])

    def trace(folder: Path) -> None:
        import torch

        from optimizer.cli.main import main

        torch.set_num_threads(1)
        (folder / "config.json").write_text(json.dumps(llama.CONFIG))
        assert main(["profile", "--model", str(folder), "-o", str(folder / "profile.json")]) == 0

    return made_once(pytestconfig, "llama", trace)


def made_once(config: pytest.Config, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` has filled: once for all processes that a run's tests are spread over, and for later runs too, as
    long as no line of the library and no version of what it is made with has changed.
    """
    root = _kept_folder(config)
    folder, half_made = root / f"{name}-{_what_profiles_rest_on()}", root / f"{name}-half-made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in root.glob(f"{name}-*"):
                shutil.rmtree(old)
            half_made.mkdir()
            make(half_made)
            half_made.rename(folder)
    return folder


def _kept_folder(config: pytest.Config) -> Path:
    """For what all processes of a run share, and later runs too."""
    cache = getattr(config, "cache", None)  # none if pytest runs without its cache
    root = Path(cache.mkdir("headroom") if cache else Path(tempfile.gettempdir(), f"headroom-tests-{os.getuid()}"))
    root.mkdir(exist_ok=True)
    return root


@functools.cache
def _what_profiles_rest_on() -> str:
    digest = hashlib.sha256("".join(f"{name} {version(name)} " for name in ("torch", "transformers", "numpy")).encode())
    for root in ("optimizer", "tests"):
        for file in sorted(Path(__file__).parents[1].joinpath(root).rglob("*.py")):
            if root == "optimizer" or file.name in ("llama.py", "generation.py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def writer_folder(pytestconfig: pytest.Config) -> Path:
    """profile.json of the tiny model that generates (``tests/webapp/generation.py``)."""

    def trace(folder: Path) -> None:
        from tests.webapp import generation

        (folder / "profile.json").write_text(json.dumps(generation.trace()))

    return made_once(pytestconfig, "writer", trace)


@pytest.fixture(scope="session")
def llama_document(llama_folder: Path) -> dict[str, Any]:
    return json.loads((llama_folder / "profile.json").read_text())


@pytest.fixture(scope="session")
def llama_profile(llama_document: dict[str, Any]) -> Profile:
    from optimizer.profile.profile import Profile

    return Profile.from_json(llama_document)


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A real server of this session's own, which does not wait for its disk."""
    with running_postgresql("fsync=off", "max_connections=60") as url:
        yield url
