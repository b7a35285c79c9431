"""Times the search over layouts and memory together, for models whose profile is at hand; CPU seconds beside wall seconds. Also
over machines that a network joins, where unequal shares and cuts of the model are searched too. Goals for those with many cards
are in CPU seconds, which other work on the machine hardly changes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.common.record import GoalEntry, Row, failure, goal
from optimizer.api.inputs import known_machine, read_model
from optimizer.api.needs import profile_for
from optimizer.api.plan import plan_profiled
from optimizer.base.errors import NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.hardware.joined import cards_of
from optimizer.hardware.machine import Machine
from optimizer.hardware.peers import with_devices
from optimizer.search.questions.layout_list import describe_layout
from optimizer.workload import Adapter, TrainingWorkload

_MOST_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model and a workload for several cards of one kind."""

    model: str
    card: str
    workload: TrainingWorkload


QUESTIONS = (
    Question(model="qwen2.5-0.5b", card="RTX 4090", workload=TrainingWorkload(sequence_length=1024, global_batch_size=8)),
    Question(model="qwen2.5-0.5b", card="RTX 3060", workload=TrainingWorkload(sequence_length=1024, global_batch_size=8)),
    Question(
        model="llama-3-8b",
        card="RTX 4090",
        workload=TrainingWorkload(sequence_length=1024, global_batch_size=8, adapter=Adapter(rank=16)),
    ),
)
NUM_DEVICES = (1, 2, 4)
JOINED: Final = (("2x RTX 4090, RTX 3060@office", "1Gbit,1ms"), ("RTX 4090, 2x RTX 3060@office", "100Mbit,20ms"))
"""Devices of two machines, and the link between them."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Many cards of several kinds on several sites."""

    name: str
    devices: str
    link: str
    """From each site to the others."""
    sites: tuple[str, ...]
    """All but the one at hand."""
    sequences_per_card: int
    most_cpu_s: float
    """The goal."""


FLEETS: Final = (
    Fleet(
        name="8 cards on 2 sites",
        devices="3x RTX 4090, RTX 3090, 4x RTX 3060@office",
        link="1Gbit,5ms",
        sites=("office",),
        sequences_per_card=4,
        most_cpu_s=2.0,
    ),
    Fleet(
        name="64 cards on 4 sites",
        devices="16x RTX 4090, 16x RTX 3090@b, 16x RTX 4090@c, 16x RTX 3060@d",
        link="1Gbit,5ms",
        sites=("b", "c", "d"),
        sequences_per_card=4,
        most_cpu_s=10.0,
    ),
)


def time_searches() -> Iterator[Row]:
    """One row for each question and number of devices, and for joined machines: the plan that was chosen, and the seconds of the
    search.
    """
    for question in QUESTIONS:
        for num_devices in NUM_DEVICES:
            machine = with_devices(known_machine(question.card), num_devices)
            yield _ask(question, machine, question.card)
    for question in QUESTIONS[::2]:
        for devices, link in JOINED:
            yield _ask(question, cards_of(devices, links={"office": link}), f"{devices} over {link}")
    for fleet in FLEETS:
        machine = cards_of(fleet.devices, links=dict.fromkeys(fleet.sites, fleet.link))
        for question in QUESTIONS[::2]:
            workload = replace(question.workload, global_batch_size=machine.total_devices * fleet.sequences_per_card)
            row = _ask(replace(question, workload=workload), machine, f"{fleet.devices} over {fleet.link}")
            yield {**row, "fleet": fleet.name}


def _ask(question: Question, machine: Machine, devices: str) -> Row:
    try:
        return _time(question, machine, devices)
    except Exception as error:
        return failure(f"{question.model} on {machine.total_devices}: {devices}", error)


def _time(question: Question, machine: Machine, devices: str) -> Row:
    num_devices = machine.total_devices
    goal_ = Goal(device_budget_bytes=machine.most_memory_bytes, allow_lossy=True, num_devices=num_devices)
    profile = profile_for(read_model(question.model), workload=question.workload, goal=replace(goal_, num_devices=1), folder=None)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        answer = plan_profiled(profile, machine=machine, workload=question.workload, goal=goal_, with_ways_out=False)
        chosen = answer.result.chosen
        found = {
            "layout": describe_layout(chosen.plan.layout),
            "step_ms": chosen.prediction.step_ms,
            "peak_bytes": chosen.prediction.device_peak_bytes,
        }
    except NoFeasiblePlan:
        found = {"layout": "nothing fits"}
    return {
        "what": "search",
        "model": question.model,
        "card": devices,
        "num_devices": num_devices,
        **found,
        "search_s": time.perf_counter() - start_s,
        "search_cpu_s": time.process_time() - start_cpu_s,
    }


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    searches = [row for row in rows if row["what"] == "search" and row["num_devices"] > 1]
    few = [row["search_s"] for row in searches if "fleet" not in row]
    goals = {"slowest search over several devices, s": _at_most(few, _MOST_S)}
    for fleet in FLEETS:
        found = [row["search_cpu_s"] for row in searches if row.get("fleet") == fleet.name]
        goals[f"slowest search over {fleet.name}, CPU s"] = _at_most(found, fleet.most_cpu_s)
    return goals


def _at_most(found: Sequence[float], most: float) -> GoalEntry:
    slowest = max(found, default=None)
    return goal(slowest, f"<= {most:g}", met=slowest is not None and slowest <= most, needs="full size")
