"""Finds the lines of the runtime that each witness reaches: a witness is a quick case on the hostile device, or a test.

Some waits are for memory, for times or for errors, where bits are no witness; the tests watch those.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from benchmarks.waits.seeds import find_difference

TESTS = (
    "tests/hostile_device/test_waits.py",
    "tests/hostile_device/ranks/test_ranks.py",
    "tests/optimizer/runtime/ranks/test_late_ranks.py",
    "tests/optimizer/runtime/ranks/pipeline/test_link.py",
    "tests/optimizer/runtime/generation/test_stage_link.py",
    "tests/optimizer/runtime/tiers/test_tiers.py",
    "tests/optimizer/runtime/tiers/test_homes.py",
    "tests/optimizer/runtime/step/test_batch.py",
    "tests/optimizer/runtime/step/test_host_update.py",
    "tests/optimizer/runtime/step/test_sparse_gradients.py",
    "tests/optimizer/runtime/step/test_step.py::test_an_update_during_backward_names_the_tensor_whose_gradient_is_not_finite",
    "tests/optimizer/runtime/step/test_weights.py::test_evaluation_leaves_no_block_on_the_device",
    "tests/optimizer/runtime/generation/test_generator.py::test_an_error_in_a_pass_leaves_no_streamed_weights_on_the_device",
)
_RUNTIME = str(Path(__file__).resolve().parents[2] / "optimizer" / "runtime")


@dataclass(frozen=True, kw_only=True)
class Witness:
    """A case or a test, and the lines that it reaches."""

    name: str
    is_test: bool
    seconds: float
    """With the tracing of lines, which is slow."""
    lines: frozenset[tuple[str, int]]
    """Module and line."""


class Tracer:
    """Notes lines of the runtime, on this thread and those that begin meanwhile."""

    def __init__(self, wanted: Collection[tuple[str, int]] | None = None) -> None:
        """wanted: modules and lines; functions that have none of them run without tracing. All are noted unless given."""
        self._wanted = None if wanted is None else frozenset(wanted)
        self._has_wanted: dict[CodeType, bool] = {}
        self._lines: set[tuple[str, int]] = set()

    @contextlib.contextmanager
    def tracing(self, name: str, *, is_test: bool, found: list[Witness]) -> Iterator[None]:
        """Add a witness at the end of the block, with the lines that were reached inside."""
        lines = self._lines = set()
        begin_s = time.monotonic()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.monotonic() - begin_s
            named = frozenset((_module_of(file), line) for file, line in lines)
            found.append(Witness(name=name, is_test=is_test, seconds=seconds, lines=named))

    def _enter(self, frame: Any, event: str, arg: object) -> Any:
        return self._note if self._is_followed(frame.f_code) else None

    def _is_followed(self, code: CodeType) -> bool:
        if not code.co_filename.startswith(_RUNTIME):
            return False
        if self._wanted is None:
            return True
        if code not in self._has_wanted:
            module = _module_of(code.co_filename)
            self._has_wanted[code] = any((module, line) in self._wanted for _, _, line in code.co_lines() if line is not None)
        return self._has_wanted[code]

    def _note(self, frame: Any, event: str, arg: object) -> Any:
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._note


class _TracedTests:
    """A plugin of pytest's: each test is a witness."""

    def __init__(self, tracer: Tracer, found: list[Witness], say: Callable[[str], None]) -> None:
        self._tracer, self._found, self._say = tracer, found, say

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._say(item.nodeid)
        with self._tracer.tracing(item.nodeid, is_test=True, found=self._found):
            return (yield)


def find_witnesses(say: Callable[[str], None], *, wanted: Collection[tuple[str, int]]) -> tuple[dict[str, str], list[Witness]]:
    """The result of each quick case on the plain CPU device, and all witnesses. Raises RuntimeError where one of them fails.

    say: is given the name of each as it begins. wanted: the lines for which witnesses are looked for, by module.
    """
    from tests.hostile_device.cases import list_quick_cases

    tracer, found = Tracer(wanted), list[Witness]()
    expected = {}
    for case in list_quick_cases():
        say(case.name)
        expected[case.name] = repr(case.expected)
        with tracer.tracing(case.name, is_test=False, found=found):
            difference = find_difference(case, expected[case.name], schedule="late", seed=0)
        if difference:
            raise RuntimeError(f"{case.name} fails with every wait in its place: {difference}")
    if run_tests(TESTS, _TracedTests(tracer, found, say)):
        raise RuntimeError(f"tests fail with every wait in its place; see {' '.join(TESTS)}")
    return expected, sorted(found, key=lambda witness: (witness.is_test, witness.seconds))


def run_tests(names: Sequence[str], *plugins: object) -> bool:
    """Report whether any failed; the first that does ends the run."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", *names], plugins=plugins)
    return code != pytest.ExitCode.OK


def _module_of(file: str) -> str:
    """The name within the runtime's package, as ``tiers.tiers``."""
    return file.removeprefix(_RUNTIME).strip("/").removesuffix(".py").replace("/", ".")
