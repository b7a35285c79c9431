"""Python without the packages that the machine of a card lacks, which has nothing of the service."""

import importlib.machinery
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = ("torch", "transformers", "numpy", "scipy", "accelerate", "peft", "nvidia-ml-py", "pytest", "setuptools")
"""That machine's; what they need is there as well."""


def hide_packages() -> None:
    """Have this process find no installed package but those, as if the others were not installed."""
    known = _with_needed(PACKAGES)
    owners = packages_distributions()
    ours = {"benchmarks", "headroom", "optimizer", "tests", "webapp", "worker"}
    hidden = {name for name, found in owners.items() if not known.intersection(map(canonicalize_name, found))} - ours
    find = importlib.machinery.PathFinder.find_spec

    def find_known(_: object, name: str, *arguments: Any) -> importlib.machinery.ModuleSpec | None:
        return None if name.partition(".")[0] in hidden else find(name, *arguments)

    assert not hidden & sys.modules.keys()
    importlib.machinery.PathFinder.find_spec = classmethod(find_known)  # type: ignore[assignment,method-assign]


def _with_needed(names: tuple[str, ...]) -> set[str]:
    known: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in known:
            continue
        known.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # of another system, as its marker says
            continue
        waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return known
