"""The plans people write by hand, priced beside the solver's so that it can be held against them.

Each is a function of the problem, as the solver is. They take the whole batch at once in fp32 with 32-bit state, as a
plain script does, except ``accumulate_all``, which keeps everything and only cuts the batch, and ``stream_all``, whose
micro-batch is the largest that fits. They are reported even where the goal forbids what they do.
"""

from collections.abc import Callable
from dataclasses import replace

from optimizer.plan.activations import BlockChoice
from optimizer.search.arrangements import PerBlock
from optimizer.search.levers import TOKENS_PER_CHUNK
from optimizer.search.problem import PricedPlan, SearchProblem, Setting, divisors

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


def selective_all(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Selective checkpointing of every block: products and attention are kept, the cheap ops run again."""
    return _whole_batch(problem), _all(problem, "selective")


def chunked_loss(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Everything kept, but never all logits at once, as with Liger's fused linear cross-entropy."""
    tokens = problem.workload.tokens_per_step
    return replace(_whole_batch(problem), num_chunks=-(-tokens // TOKENS_PER_CHUNK[0])), _all(problem, "keep")


def offload_optimizer(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Gradients and optimizer state on the host, the update there, as ZeRO-Offload does on one device."""
    return replace(_whole_batch(problem), gradients="host", state_place="host"), _all(problem, "keep")


def stream_all(problem: SearchProblem) -> tuple[Setting, PerBlock]:
    """Weights, gradients and state on the host, every block recomputed, as ZeRO-Infinity does on one device."""
    total, per_block = problem.workload.global_batch_size, _all(problem, "recompute")
    sizes = reversed(divisors(total))
    settings = [
        Setting(
            micro_batch_size=size,
            accumulation_steps=total // size,
            gradients="host",
            state_place="host",
            weights_place="host",
        )
        for size in sizes
    ]
    fitting = (setting for setting in settings if problem.fits_device(problem.price(setting.plan(per_block))))
    return next(fitting, settings[-1]), per_block


BASELINES: dict[str, Baseline] = {
    "keep_all": keep_all,
    "recompute_all": recompute_all,
    "selective_all": selective_all,
    "offload_all": offload_all,
    "every_second": every_second,
    "accumulate_all": accumulate_all,
    "chunked_loss": chunked_loss,
    "offload_optimizer": offload_optimizer,
    "stream_all": stream_all,
}


_WITH_GRADIENTS_AWAY = (offload_optimizer, stream_all)
"""Sparse gradients stay on the device (``Plan.find_conflict``)."""


def list_baselines(problem: SearchProblem) -> dict[str, Baseline]:
    """Those that the model allows, by label."""
    left_out = _WITH_GRADIENTS_AWAY if problem.has_sparse_gradients else ()
    return {label: baseline for label, baseline in BASELINES.items() if baseline not in left_out}


def price_baselines(problem: SearchProblem) -> dict[str, PricedPlan]:
    """All that the model allows, by label; one plan per label, also where two coincide on a small problem."""
    priced = {}
    for label, baseline in list_baselines(problem).items():
        setting, per_block = baseline(problem)
        plan = setting.plan(per_block)
        priced[label] = problem.priced(label, plan, problem.price(plan))
    return priced


def _whole_batch(problem: SearchProblem) -> Setting:
    return Setting(micro_batch_size=problem.workload.global_batch_size, accumulation_steps=1)


def _all(problem: SearchProblem, choice: BlockChoice) -> PerBlock:
    return (choice,) * problem.num_blocks
