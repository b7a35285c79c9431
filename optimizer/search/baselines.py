"""The plans people write by hand, priced beside the solver's so that it can be held against them.

Each is a function of the problem, as the solver is. They take the whole batch at once in fp32 with 32-bit state, as a
plain script does, except ``accumulate_all``, which keeps everything and only cuts the batch. They are reported even
where the goal forbids what they do.
"""

from collections.abc import Callable

from optimizer.plan.activations import BlockChoice
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import PricedPlan, SearchProblem, Setting

Baseline = Callable[[SearchProblem], tuple[Setting, PerBlock]]


def keep_all(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Plain training."""
    return _whole_batch(problem), _all(problem, "keep")


def recompute_all(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Gradient checkpointing of every block."""
    return _whole_batch(problem), _all(problem, "recompute")


def offload_all(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Everything saved goes to the host, as with save_on_cpu."""
    return _whole_batch(problem), _all(problem, "offload")


def every_second(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Blocks 0, 2, 4, ... are recomputed."""
    blocks: list[BlockChoice] = ["recompute" if index % 2 == 0 else "keep" for index in range(problem.num_blocks)]
    return _whole_batch(problem), tuple(blocks)


def accumulate_all(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """One sequence at a time, everything kept."""
    return Setting(micro_batch_size=1, accumulation_steps=problem.workload.global_batch_size), _all(problem, "keep")


BASELINES: dict[str, Baseline] = {
    "keep_all": keep_all,
    "recompute_all": recompute_all,
    "offload_all": offload_all,
    "every_second": every_second,
    "accumulate_all": accumulate_all,
}


def price_baselines(problem: SearchProblem) -> dict[str, PricedPlan]:
    """All of them by label; one plan per label, also where two coincide on a small problem."""
    priced = {}
    for label, baseline in BASELINES.items():
        setting, per_block = baseline(problem)
        plan = setting.plan(per_block)
        priced[label] = problem.priced(label, plan, problem.price(plan))
    return priced


def _whole_batch(problem: SearchProblem) -> Setting:
    return Setting(micro_batch_size=problem.workload.global_batch_size, accumulation_steps=1)


def _all(problem: SearchProblem, choice: BlockChoice) -> PerBlock:
    return (choice,) * problem.num_blocks
