"""The plans people write by hand, priced beside the solver's so that it can be held against them.

Each is a function of the problem, as the solver is. They take the whole batch at once in fp32 with 32-bit state, as a
plain script does, except ``accumulate_all``, which keeps everything and only cuts the batch, and ``stream_all``, whose
micro-batch is the largest that fits. They are reported even where the goal forbids what they do.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from optimizer.plan.activations import BlockChoice
from optimizer.plan.logits_and_loss import MAX_CHUNKS
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem, divisors
from optimizer.search.solver.grid import TOKENS_PER_CHUNK

Baseline = Callable[[SearchProblem], tuple[OuterPlan, PerBlock]]


def keep_all(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Plain training."""
    return _whole_batch(problem), _all(problem, "keep")


def recompute_all(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Gradient checkpointing of every block."""
    return _whole_batch(problem), _all(problem, "recompute")


def offload_all(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Everything saved goes to the host, as with save_on_cpu."""
    return _whole_batch(problem), _all(problem, "offload")


def every_second(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Blocks 0, 2, 4, ... are recomputed."""
    return _whole_batch(problem), _every(problem, 2)


def every_third(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Blocks 0, 3, 6, ... are recomputed."""
    return _whole_batch(problem), _every(problem, 3)


def every_root(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Every k-th block is recomputed, k the square root of their number."""
    return _whole_batch(problem), _every(problem, max(1, round(math.sqrt(problem.num_blocks))))


def accumulate_all(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """One sequence at a time, everything kept."""
    setting = replace(_whole_batch(problem), micro_batch_size=1, accumulation_steps=problem.workload.global_batch_size)
    return setting, _all(problem, "keep")


def selective_all(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Selective checkpointing of every block: products and attention are kept, the cheap ops run again."""
    return _whole_batch(problem), _all(problem, "selective")


def chunked_loss(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Everything kept, but never all logits at once, as with Liger's fused linear cross-entropy."""
    tokens = problem.workload.tokens_per_step
    return replace(_whole_batch(problem), num_chunks=min(MAX_CHUNKS, -(-tokens // TOKENS_PER_CHUNK[0]))), _all(problem, "keep")


def offload_optimizer(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Gradients and optimizer state on the host, the update there, as ZeRO-Offload does on one device."""
    return replace(_whole_batch(problem), gradients="host", state_place="host"), _all(problem, "keep")


def stream_all(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """Weights, gradients and state on the host, every block recomputed, as ZeRO-Infinity does on one device."""
    total, per_block = problem.workload.global_batch_size, _all(problem, "recompute")
    sizes = reversed(divisors(total))
    settings = [
        OuterPlan(
            micro_batch_size=size,
            accumulation_steps=total // size,
            gradients="host",
            state_place="host",
            weights_place="host",
            layout=problem.layout,
        )
        for size in sizes
    ]
    fitting = (setting for setting in settings if problem.fits_device(problem.price(setting.plan(per_block))))
    return next(fitting, settings[-1]), per_block


def torch_memory_budget(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """The baseline of torch's ``activation_memory_budget``, set to the largest tenth with which the step fits, by us; 0
    where none does. With alike blocks its knapsack keeps that share of them; it knows blocks here, where torch knows
    single ops."""
    setting, depth = _whole_batch(problem), problem.num_blocks
    for tenths in range(_TENTHS, 0, -1):
        per_block = _keeping(problem, depth * tenths // _TENTHS)
        if problem.fits_device(problem.price(setting.plan(per_block))):
            return setting, per_block
    return setting, _keeping(problem, 0)


def torch_sac_milp(problem: SearchProblem) -> tuple[OuterPlan, PerBlock]:
    """The baseline of torch's ``sac_milp``: as few blocks are recomputed as its own memory model says are needed, which
    counts weights, gradients and activations, and neither optimizer state nor temporaries. By block; what it counts is
    taken from our prices."""
    setting, depth = _whole_batch(problem), problem.num_blocks
    kept, rebuilt = (problem.price(setting.plan(_keeping(problem, number))) for number in (depth, 0))
    sizes = kept.device_bytes_by_category
    static_bytes = 2 * sizes.get("weights", 0)
    least_bytes = rebuilt.device_bytes_by_category.get("activations", 0)
    each_bytes = max(0, sizes.get("activations", 0) - least_bytes) / depth
    room_bytes = problem.goal.device_budget_bytes - static_bytes - least_bytes
    number = depth if each_bytes == 0 else max(0, min(depth, int(room_bytes // each_bytes)))
    return setting, _keeping(problem, number)


_TENTHS = 10
BASELINES: dict[str, Baseline] = {
    "keep_all": keep_all,
    "recompute_all": recompute_all,
    "selective_all": selective_all,
    "offload_all": offload_all,
    "every_second": every_second,
    "every_third": every_third,
    "every_root": every_root,
    "torch_memory_budget": torch_memory_budget,
    "torch_sac_milp": torch_sac_milp,
    "accumulate_all": accumulate_all,
    "chunked_loss": chunked_loss,
    "offload_optimizer": offload_optimizer,
    "stream_all": stream_all,
}


_WITH_GRADIENTS_AWAY = (offload_optimizer, stream_all)
"""Sparse gradients stay on the device (``Plan.find_conflict``)."""


def list_baselines(problem: SearchProblem) -> dict[str, Baseline]:
    """Those that the model and the devices allow, by label."""
    left_out: tuple[Baseline, ...] = _WITH_GRADIENTS_AWAY if problem.has_sparse_gradients else ()
    if problem.layout.shares_state:
        left_out = (*left_out, stream_all)
    return {label: baseline for label, baseline in BASELINES.items() if baseline not in left_out}


def price_baselines(problem: SearchProblem) -> dict[str, PricedPlan]:
    """All that the model allows, by label; one plan per label, also where two coincide on a small problem.

    What comes with the tensors on a card is worked out only where the tensors alone have room.
    """
    found: dict[Plan, PricedPlan] = {}
    priced = {}
    for label, baseline in list_baselines(problem).items():
        setting, per_block = baseline(problem)
        plan = setting.plan(per_block)
        if plan not in found:
            prediction = problem.price(plan)
            is_too_large = problem.verdict(prediction) == "does_not_fit"
            found[plan] = problem.priced(label, plan, prediction, in_detail=not is_too_large)
        priced[label] = replace(found[plan], label=label)
    return priced


def _whole_batch(problem: SearchProblem) -> OuterPlan:
    size = problem.workload.global_batch_size
    return OuterPlan(micro_batch_size=size, accumulation_steps=1, layout=problem.layout)


def _all(problem: SearchProblem, choice: BlockChoice) -> PerBlock:
    return (choice,) * problem.num_blocks


def _every(problem: SearchProblem, step: int) -> PerBlock:
    blocks: list[BlockChoice] = ["recompute" if index % step == 0 else "keep" for index in range(problem.num_blocks)]
    return tuple(blocks)


def _keeping(problem: SearchProblem, number: int) -> PerBlock:
    """The last ones keep, the others are recomputed."""
    num_rebuilt = problem.num_blocks - number
    return tuple("recompute" if index < num_rebuilt else "keep" for index in range(problem.num_blocks))
