"""Deep problems with every knob open: a 70B Llama cut or stretched to a depth, on a card from the table."""

from dataclasses import replace
from typing import Literal

from benchmarks.search.profiles import llama_70b_profile, with_depth
from optimizer.base.units import GIB
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.search.problem import SearchProblem
from optimizer.search.result import SearchResult
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

CARD = "RTX 4090"
HOST_BYTES = 4000 * GIB
"""Room for 16 bytes of each weight of 120 blocks."""
WORKLOAD = TrainingWorkload(sequence_length=2048, global_batch_size=16)


def deep_problem(
    num_blocks: int, *, device_budget_bytes: int, allow_lossy: bool, kind: Literal["cpu", "cuda"] = "cuda"
) -> SearchProblem:
    machine = table_machine(CARD)
    machine = replace(machine, device=replace(machine.device, kind=kind))
    goal = Goal(device_budget_bytes=device_budget_bytes, allow_lossy=allow_lossy, host_budget_bytes=HOST_BYTES)
    problem = training_problem(
        with_depth(llama_70b_profile(), num_blocks), workload=WORKLOAD, goal=goal, machine=machine
    )
    # What comes with the tensors on this card is no question of the search's time.
    return replace(problem, detail=None)


def rounded_gap(result: SearchResult) -> float | None:
    return None if result.gap is None else round(result.gap, 5)
