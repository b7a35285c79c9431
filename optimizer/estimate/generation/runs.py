"""Prices what a generation ran, for its machine's calibration to learn from (``hardware/calibration.py``). Torch-free."""

from collections.abc import Sequence

from optimizer.estimate.generation.one_pass import GenerationPass, times_of
from optimizer.estimate.generation.pricing import by_kind
from optimizer.hardware.calibration import TimedRun
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.run import TimedPass
from optimizer.profile.generation import GenerationProfile
from optimizer.workload import GenerationWorkload


def price_run(
    profile: GenerationProfile,
    *,
    plan: GenerationPlan,
    passes: Sequence[TimedPass],
    draws: bool,
    machine: Machine,
) -> TimedRun:
    """Price a finished run by the machine's own rates, whatever else it has learnt. draws: whether some sequence drew
    its tokens.
    """
    workload = GenerationWorkload(draws=draws)
    kinds_ms: dict[str, float] = {}
    like: GenerationPass | None = None
    for each in passes:
        like = GenerationPass(
            profile, plan, workload, machine, micro_batches=each.micro_batches, like=like, is_rough=True
        )
        for kind, kind_ms in by_kind(times_of(like.prefill) + like.decode_sum.ms).items():
            kinds_ms[kind] = kinds_ms.get(kind, 0.0) + each.count * kind_ms
    return TimedRun(predicted_ms=kinds_ms, measured_ms=sum(each.total_ms for each in passes))
