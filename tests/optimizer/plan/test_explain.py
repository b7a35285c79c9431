"""Plans in sentences."""

from dataclasses import dataclass

import pytest

from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.explain import describe_blocks, explain_plan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class Cost:
    device_peak_bytes: int
    step_ms: float
    device_peak_high_bytes: int = 350 * MIB
    host_peak_bytes: int = 0
    peak_moment: str = "backward of block 11 of 12"
    exposed_copy_ms: float = 0.0


PLAN = Plan(
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=4),
    activations=ActivationsPlan(per_block=("recompute",) * 8 + ("keep",) * 4),
)


@pytest.mark.parametrize(
    ("per_block", "sentence"),
    [
        (("keep",) * 12, "all 12 blocks keep their activations"),
        (("recompute",), "the only block is recomputed in backward"),
        (
            ("recompute",) * 8 + ("keep",) * 4,
            "the last 4 of 12 blocks keep their activations; the first 8 are recomputed in backward",
        ),
        (
            ("offload",) + ("recompute",) * 2 + ("keep",),
            (
                "the last of 4 blocks keeps its activations; the first moves its activations to the host; "
                "the next 2 are recomputed in backward"
            ),
        ),
        (
            ("offload", "recompute") * 2,
            "of 4 blocks 2 are recomputed in backward, 2 move their activations to the host, in turns",
        ),
    ],
)
def test_runs_of_blocks_are_described_from_the_last(per_block, sentence):
    assert describe_blocks(per_block) == sentence


def test_cost_and_saving_are_against_keep_all():
    sentences = explain_plan(
        PLAN,
        prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0),
        baseline=Cost(device_peak_bytes=650 * MIB, step_ms=100.0),
    )
    assert "costs 18 % of step time against keep-all, saves 310 MiB" in sentences


def test_a_faster_plan_that_needs_more_says_so():
    sentences = explain_plan(
        PLAN,
        prediction=Cost(device_peak_bytes=340 * MIB, step_ms=80.0),
        baseline=Cost(device_peak_bytes=330 * MIB, step_ms=100.0),
    )
    assert "takes 20 % less step time against keep-all, needs 10.0 MiB more" in sentences


def test_batch_peak_and_representation_each_have_a_sentence():
    sentences = explain_plan(PLAN, prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0))
    assert sentences[1:] == [
        "the batch of 8 runs as 4 micro-batches of 2, whose gradients are summed",
        "the numbers are those of plain fp32 training",
        "the peak of 340 MiB (at most 350 MiB) falls in backward of block 11 of 12",
    ]


def test_lossy_choices_are_owned_up_to():
    plan = Plan(
        batch=BatchPlan(micro_batch_size=8, accumulation_steps=1),
        weights=WeightsPlan(dtype="bf16"),
        optimizer_state=OptimizerStatePlan(bits=8),
        activations=PLAN.activations,
    )
    sentences = explain_plan(plan, prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0))
    assert sum("results differ slightly" in sentence for sentence in sentences) == 2
    assert "the whole batch of 8 runs at once" in sentences


@pytest.mark.parametrize(
    ("exposed_ms", "ending"), [(0.0, "the copies hide behind compute"), (2.5, "compute waits 2.5 ms a step for copies")]
)
def test_offloaded_bytes_are_named_with_the_wait_they_cause(exposed_ms, ending):
    cost = Cost(device_peak_bytes=340 * MIB, step_ms=118.0, host_peak_bytes=100 * MIB, exposed_copy_ms=exposed_ms)
    assert explain_plan(PLAN, prediction=cost)[-1] == f"100 MiB of activations pass through host memory; {ending}"
