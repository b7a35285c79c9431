"""Part (a): small problems drawn by chance, each answered by trying every plan and by a search.

A family is a model, a machine, a workload and what may be decided; its plans are priced once. Its instances differ in the
budgets of device, host and disk, from below what is feasible to above plain training. The answer must be the best one to the
bit: the same step time, or that nothing fits; the bound must lie under it, and the search must know that its answer is the best.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, all_of, goal
from benchmarks.search.every import every_plan
from benchmarks.search.profiles import tiny_profile, with_depth
from benchmarks.search.synthetic import synthetic_problem
from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem
from optimizer.search.questions.largest_fit import find_largest_micro_batch
from optimizer.search.training import training_problem
from optimizer.workload import Adapter, TrainingWorkload

LEAST_INSTANCES = 300
PER_FAMILY = 12
MAX_PLANS = 6_000
"""Most plans of a family: with more, another technique is forbidden until there are fewer."""
LARGEST_EVERY = 6
"""One instance in this many also asks for the largest micro-batch."""
_MODELS = ("llama", "gpt2", "gemma3_text")
_NEVER_FORBIDDEN = ("quantize_frozen",)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Problems that differ in budgets alone, with all their plans."""

    name: str
    problem: SearchProblem
    plans: tuple[tuple[Plan, Prediction], ...]


def small_rows(options: Options) -> Iterator[Row]:
    num_families = 4 if options.quick else -(-LEAST_INSTANCES // PER_FAMILY)
    models = _MODELS[:1] if options.quick else _MODELS
    for index in (index for index in range(num_families) if options.wants(index)):
        draw = random.Random(f"{options.seed} {index}")
        family = draw_family(draw, models=models)
        for instance in range(PER_FAMILY):
            problem = draw_budgets(draw, family)
            head = {"part": "small", "index": index, "family": family.name}
            yield {**head, **compare(problem, family.plans)}
            if instance % LARGEST_EVERY == 0:
                yield {**head, **compare_largest(problem, family.plans)}


def draw_family(draw: random.Random, *, models: Sequence[str]) -> Family:
    """Synthetic or of a real profile, in turn by chance; with as much forbidden as keeps it small."""
    name, problem = _synthetic(draw) if draw.random() < 0.4 else _real(draw, draw.choice(models))
    names = [name for name in get_args(Technique) if name not in _NEVER_FORBIDDEN]
    forbid: list[Technique] = draw.sample(names, k=draw.randint(0, 5))
    problem = _forbidding(problem, forbid)
    plans = _list_plans(problem)
    while plans is None:
        forbid.append(draw.choice([name for name in names if name not in forbid]))
        problem = _forbidding(problem, forbid)
        plans = _list_plans(problem)
    problem = replace(problem, price=cache(problem.price))
    return Family(
        name=f"{name}, without {', '.join(forbid) or 'nothing'}",
        problem=problem,
        plans=tuple((plan, problem.price(plan)) for plan in plans),
    )


def draw_budgets(draw: random.Random, family: Family) -> SearchProblem:
    predictions = [prediction for _, prediction in family.plans]
    highs = sorted(prediction.device_peak_high_bytes for prediction in predictions)
    budget_bytes = draw.choice(
        [
            draw.choice(highs),
            draw.choice(highs) - 1,
            draw.randint(highs[0], highs[-1]),
            draw.randint(int(0.98 * highs[0]), int(1.05 * highs[-1])),
        ]
    )
    problem = family.problem.with_budget(budget_bytes)
    if draw.random() < 0.5:
        problem = replace(problem, host_budget_bytes=draw.choice(sorted({p.host_peak_bytes for p in predictions})))
    if draw.random() < 0.5:
        problem = replace(problem, disk_budget_bytes=draw.choice(sorted({p.disk_peak_bytes for p in predictions})))
    return problem


def compare(problem: SearchProblem, plans: Sequence[tuple[Plan, Prediction]]) -> Row:
    best_ms = min((prediction.step_ms for prediction in _fitting(problem, plans)), default=None)
    row: Row = {"objective": "fastest step", "num_plans": len(plans), "best_ms": best_ms}
    try:
        result = search(problem)
    except NoFeasiblePlan:
        return row | {"found_ms": None, "optimal": best_ms is None, "proven": best_ms is None}
    found_ms = result.chosen.prediction.step_ms
    return row | {
        "found_ms": found_ms,
        "bound_ms": result.bound_step_ms,
        "optimal": found_ms == best_ms and result.gap is not None,
        "proven": result.is_optimal,
    }


def compare_largest(problem: SearchProblem, plans: Sequence[tuple[Plan, Prediction]]) -> Row:
    """The largest micro-batch for which some plan fits, and the fastest plan with it."""
    fitting = [(plan.batch.micro_batch_size, prediction.step_ms) for plan, prediction in plans if problem.fits(prediction)]
    largest = max((size for size, _ in fitting), default=None)
    best_ms = min((step_ms for size, step_ms in fitting if size == largest), default=None)
    row: Row = {"objective": "largest micro-batch", "num_plans": len(plans), "best_ms": best_ms}
    try:
        found = find_largest_micro_batch(problem)
    except NoFeasiblePlan:
        return row | {"found_ms": None, "optimal": best_ms is None, "proven": best_ms is None}
    found_ms = found.prediction.step_ms
    is_best = (found.plan.batch.micro_batch_size, found_ms) == (largest, best_ms)
    return row | {"found_ms": found_ms, "optimal": is_best, "proven": is_best}


def _fitting(problem: SearchProblem, plans: Sequence[tuple[Plan, Prediction]]) -> Iterator[Prediction]:
    return (prediction for _, prediction in plans if problem.fits(prediction))


def _list_plans(problem: SearchProblem) -> list[Plan] | None:
    """None where there are too many."""
    plans = []
    for plan in every_plan(problem):
        plans.append(plan)
        if len(plans) > MAX_PLANS:
            return None
    return plans


def _forbidding(problem: SearchProblem, forbid: Sequence[Technique]) -> SearchProblem:
    return replace(problem, goal=replace(problem.goal, forbid=tuple(forbid)))


def _workload(draw: random.Random) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=draw.choice([32, 64, 128]),
        global_batch_size=draw.choice([1, 2, 4]),
        max_grad_norm=draw.choice([None, 1.0]),
        optimizer=draw.choice(["adamw", "adamw", "sgd"]),
        adapter=None,
        eval_batches=draw.choice([1, 8]),
    )


def _synthetic(draw: random.Random) -> tuple[str, SearchProblem]:
    num_blocks = draw.randint(2, 6)
    problem = synthetic_problem(
        budget_mib=1,
        num_blocks=num_blocks,
        global_batch_size=draw.choice([1, 2, 4]),
        allow_lossy=draw.random() < 0.5,
        max_grad_norm=draw.choice([None, 1.0]),
        adapter=Adapter() if draw.random() < 0.15 else None,
        disk_budget_mib=draw.choice([0, 10**6]),
        remote_budget_mib=draw.choice([0, 0, 10**6]),
        weight_mib=draw.choice([1, 5, 10, 40]),
        saved_mib=draw.choice([5, 20, 60]),
        selective_mib=draw.choice([3, 11]),
        input_mib=draw.choice([1, 2, 8]),
        loss_mib=draw.choice([5, 15, 120]),
        copy_ms_per_mib=draw.choice([0.05, 0.2, 1.0, 3.0]),
        chunk_ms=draw.choice([0.0, 0.4]),
    )
    return f"synthetic of {num_blocks} blocks", problem


def _real(draw: random.Random, name: str) -> tuple[str, SearchProblem]:
    num_blocks = draw.randint(2, 6)
    profile = with_depth(tiny_profile(name), num_blocks)
    machine_name, machine = draw_machine(draw)
    goal = Goal(device_budget_bytes=1, allow_lossy=draw.random() < 0.5)
    problem = training_problem(profile, workload=_workload(draw), goal=goal, machine=machine)
    return f"{name} of {num_blocks} blocks, {machine_name}", replace(problem, detail=None)


def draw_machine(draw: random.Random) -> tuple[str, Machine]:
    """Draw a machine of the table, as CUDA or as the CPU device, with compute slow or fast beside the links."""
    machine = table_machine(draw.choice(["RTX 3060 12GB", "RTX 4090", "H100 SXM"]))
    kind: Literal["cpu", "cuda"] = draw.choice(("cpu", "cuda"))
    slowness = draw.choice([1.0, 1e-3])
    rates: dict[str, Any] = {
        "op_overhead_s": machine.rates.op_overhead_s * draw.choice([1.0, 1e-3]),
        "memory_bytes_per_s": machine.rates.memory_bytes_per_s * slowness,
        "matmul_flops_per_s": {name: rate * slowness for name, rate in machine.rates.matmul_flops_per_s.items()},
        "fresh_bytes_per_s": draw.choice([None, 2e9]) if kind == "cpu" else None,
    }
    if draw.random() < 0.5:
        rates |= {"disk_write_bytes_per_s": 1e9, "disk_read_bytes_per_s": 2e9}
    machine = replace(
        machine,
        device=replace(machine.device, kind=kind),
        rates=replace(machine.rates, **rates),
        disk_free_bytes=10**12,
        host_memory_bytes=10**12,
    )
    return f"{kind} {'slow' if slowness < 1 else 'fast'}", machine


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    return {
        "small problems answered as by trying every plan": all_of(row["optimal"] for row in rows),
        "of them known by the search to be the best": all_of(row["proven"] for row in rows),
        "small problems": goal(len(rows), LEAST_INSTANCES, met=len(rows) >= LEAST_INSTANCES, needs="all cases"),
    }


PART = Part(name="small", measure=small_rows, summarize=summarize, case="index")
