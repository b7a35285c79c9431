"""Times the search over layouts and memory together, for models whose profile is at hand; CPU seconds beside wall seconds."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.record import GoalEntry, Row, failure, goal
from optimizer.api.inputs import known_machine, read_model
from optimizer.api.needs import profile_for
from optimizer.api.plan import plan_profiled
from optimizer.base.errors import NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.hardware.peers import with_devices
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


def time_searches() -> Iterator[Row]:
    """One row for each question and number of devices: the plan that was chosen, and the seconds of the search."""
    for question in QUESTIONS:
        for num_devices in NUM_DEVICES:
            try:
                yield _ask(question, num_devices)
            except Exception as error:
                yield failure(f"{question.model} on {num_devices} x {question.card}", error)


def _ask(question: Question, num_devices: int) -> Row:
    machine = with_devices(known_machine(question.card), num_devices)
    goal_ = Goal(device_budget_bytes=machine.device.memory_bytes, allow_lossy=True, num_devices=num_devices)
    profile = profile_for(read_model(question.model), workload=question.workload, goal=replace(goal_, num_devices=1), folder=None)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        answer = plan_profiled(profile, machine=machine, workload=question.workload, goal=goal_, with_ways_out=False)
        chosen = answer.result.chosen
        found = {
            "layout": f"{chosen.plan.layout.num_devices} {chosen.plan.layout.data}",
            "step_ms": chosen.prediction.step_ms,
            "peak_bytes": chosen.prediction.device_peak_bytes,
        }
    except NoFeasiblePlan:
        found = {"layout": "nothing fits"}
    return {
        "what": "search",
        "model": question.model,
        "card": question.card,
        "num_devices": num_devices,
        **found,
        "search_s": time.perf_counter() - start_s,
        "search_cpu_s": time.process_time() - start_cpu_s,
    }


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    searches = [row["search_s"] for row in rows if row["what"] == "search" and row["num_devices"] > 1]
    slowest = max(searches, default=None)
    return {
        "slowest search over several devices, s": goal(
            slowest, f"<= {_MOST_S:g}", met=slowest is not None and slowest <= _MOST_S, needs="full size"
        )
    }
