"""The benchmark of waits asks those who reach a wait, and misses its goal where nobody notices that one is gone."""

import ast
import inspect
import multiprocessing
import time
from typing import Any

import torch

from benchmarks.waits.reach import Tracer, Witness
from benchmarks.waits.removed import _in_process, summarize
from optimizer.runtime.step.micro_batch import count_labels
from tests.hostile_device.mutations import _without_wait, list_mutations

FORK = multiprocessing.get_context("fork")


def test_a_witness_has_the_lines_of_the_runtime_that_it_reaches() -> None:
    found: list[Witness] = []
    with Tracer().tracing("counting", is_test=False, found=found):
        count_labels([(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))])
    (witness,) = found
    code, first = inspect.getsourcelines(count_labels)
    assert {module for module, _ in witness.lines} == {"step.micro_batch"}
    assert ("step.micro_batch", first + len(code) - 1) in witness.lines
    assert ("step.micro_batch", first + code.index("            return None\n")) not in witness.lines


def test_functions_without_a_wanted_line_are_not_followed() -> None:
    found: list[Witness] = []
    code, first = inspect.getsourcelines(count_labels)
    last = first + len(code) - 1
    for module, line in (("step.micro_batch", last), ("step.micro_batch", first - 1), ("step.step", last)):
        with Tracer([(module, line)]).tracing("counting", is_test=False, found=found):
            count_labels([(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))])
    assert [bool(witness.lines) for witness in found] == [True, False, False]


def test_waits_are_placed_as_witnesses_place_lines() -> None:
    places = {mutation.place.rpartition(":")[0] for mutation in list_mutations()}
    assert {"tiers.tiers", "step.step", "generation.generator", "meter.meter"} <= places
    assert {"ranks.group", "ranks.pipeline.link", "generation.stages.link"} <= places


def test_what_begins_in_the_line_of_a_wait_begins_without_it() -> None:
    statements = ("copy(a).finish()", "self._finish(self._group.reduce(a), 'a sum')", "_settle(self._held)", "self.join()")
    calls: list[Any] = [ast.parse(each, mode="eval").body for each in statements]
    left = [ast.unparse(_without_wait(call)) for call in calls]
    assert left == ["copy(a)", "self._group.reduce(a)", "pass", "pass"]


def test_a_wait_that_nobody_notices_misses_the_goal() -> None:
    caught = {"what": "wait", "wait": "tiers.tiers:1 wait: a()", "outcome": "caught", "by": "a case"}
    share = "share of removed waits that are caught"
    assert summarize([caught])[share]["met"]
    survived = {**caught, "wait": "tiers.tiers:2 wait: b()", "outcome": "survived", "by": ""}
    assert summarize([caught, survived])[share] == {"value": 0.5, "goal": 1.0, "met": False}
    assert not summarize([])[share]["met"]


def test_a_process_that_falls_silent_is_known_by_what_it_said_last() -> None:
    def run(say: Any) -> None:
        say("first")
        say("second")
        time.sleep(60)

    assert _in_process(FORK, run, silent_s=0.5) == ("second", "hangs for 0 s")


def test_a_process_that_dies_is_known_by_what_it_said_last() -> None:
    def run(say: Any) -> None:
        say("first")

    assert _in_process(FORK, run, silent_s=60) == ("first", "the process died")
