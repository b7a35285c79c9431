"""Plans in sentences."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.explain.diff import different_cells
from optimizer.plan.explain.training import describe_blocks, describe_left_out, describe_move_or_rebuild, explain_plan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
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
    disk_peak_bytes: int = 0
    remote_peak_bytes: int = 0
    copied_bytes: dict[str, int] = field(default_factory=dict)
    exposed_ms: dict[str, float] = field(default_factory=dict)
    network_bytes: int = 0
    once_s: float = 0.0


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
            ("offload", "recompute") * 3,
            "of 6 blocks 3 are recomputed in backward, 3 move their activations to the host, in turns",
        ),
        (
            ("offload_disk",) * 2 + ("offload_remote",) + ("selective",) * 3,
            (
                "the last 3 of 6 blocks keep products and attention and recompute the rest; "
                "the first 2 move their activations to disk; the next moves its activations to the remote store"
            ),
        ),
    ],
)
def test_runs_of_blocks_are_described_from_the_last(per_block: tuple[str, ...], sentence: str) -> None:
    assert describe_blocks(per_block) == sentence


def test_cost_and_saving_are_against_keep_all() -> None:
    sentences = explain_plan(
        PLAN,
        prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0),
        baseline=Cost(device_peak_bytes=650 * MIB, step_ms=100.0),
    )
    assert "costs 18 % of step time against keep-all, saves 310 MiB" in sentences


def test_a_faster_plan_that_needs_more_says_so() -> None:
    sentences = explain_plan(
        PLAN,
        prediction=Cost(device_peak_bytes=340 * MIB, step_ms=80.0),
        baseline=Cost(device_peak_bytes=330 * MIB, step_ms=100.0),
    )
    assert "takes 20 % less step time against keep-all, needs 10.0 MiB more" in sentences


@pytest.mark.parametrize(
    ("step_ms", "sentence"),
    [
        (100.2, "takes as long and peaks as high as keep-all"),
        (90.0, "takes 10 % less step time against keep-all, peaks as high"),
    ],
)
def test_a_plan_that_saves_nothing_says_no_bytes(step_ms: float, sentence: str) -> None:
    baseline = Cost(device_peak_bytes=340 * MIB, step_ms=100.0)
    prediction = Cost(device_peak_bytes=340 * MIB, step_ms=step_ms)
    assert sentence in explain_plan(PLAN, prediction=prediction, baseline=baseline)


def test_batch_peak_and_representation_each_have_a_sentence() -> None:
    sentences = explain_plan(PLAN, prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0))
    assert sentences[1:] == [
        "the batch of 8 runs as 4 micro-batches of 2, whose gradients are summed",
        "the numbers are those of plain fp32 training",
        "the peak of 340 MiB (at most 350 MiB) falls in backward of block 11 of 12",
    ]


def test_lossy_choices_are_owned_up_to() -> None:
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
def test_what_other_tiers_hold_and_what_moves_is_named_with_the_wait_it_causes(exposed_ms: float, ending: str) -> None:
    cost = Cost(
        device_peak_bytes=340 * MIB,
        step_ms=118.0,
        host_peak_bytes=100 * MIB,
        disk_peak_bytes=30 * MIB,
        copied_bytes={"device_to_host": 100 * MIB, "host_to_disk": 30 * MIB, "host_to_device": 70 * MIB},
        exposed_copy_ms=exposed_ms,
    )
    assert explain_plan(PLAN, prediction=cost)[-2:] == [
        "other memory holds up to 100 MiB on the host and 30.0 MiB on disk",
        f"each step copies 100 MiB to the host, 70.0 MiB back to the device and 30.0 MiB on to disk; {ending}",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"logits_and_loss": LogitsAndLossPlan(num_chunks=8)},
            "logits and loss are computed in 8 chunks, never all at once",
        ),
        (
            {"gradients": GradientsPlan(choice="consume")},
            "each tensor is updated as soon as its gradient is complete, so gradients never exist all at once",
        ),
        ({"gradients": GradientsPlan(choice="host")}, "each gradient moves to the host as it appears"),
        (
            {"optimizer_state": OptimizerStatePlan(place="host", fraction=0.5)},
            "50 % of the optimizer state lives on the host and is updated there",
        ),
        (
            {"optimizer_state": OptimizerStatePlan(place="disk")},
            "the optimizer state lives in a file on disk and is updated on the host",
        ),
        (
            {"weights": WeightsPlan(place="host", prefetch=2)},
            "each block's weights come from the host as they are needed, 2 blocks ahead",
        ),
        (
            {"weights": WeightsPlan(place="disk", prefetch=0)},
            "each block's weights come from disk as they are needed, none ahead",
        ),
        (
            {"weights": WeightsPlan(autocast="bf16")},
            "products and attention run in bf16 on fp32 weights; results differ slightly",
        ),
        (
            {"weights": WeightsPlan(dtype="fp16")},
            (
                "weights, gradients and activations are fp16, beside fp32 master weights, "
                "and the loss is scaled so that small gradients survive; results differ slightly"
            ),
        ),
        (
            {"weights": WeightsPlan(dtype="bf16", frozen="nf4")},
            "the matrices under the adapters are held in nf4; results differ slightly",
        ),
        (
            {"activations": ActivationsPlan(per_block=("offload",), compress="int8")},
            "offloaded activations travel as int8, with a scale for each 256 elements; results differ slightly",
        ),
    ],
)
def test_each_decision_has_a_sentence(change: dict[str, Any], sentence: str) -> None:
    sentences = explain_plan(replace(PLAN, **change), prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0))
    assert sentence in sentences


def test_what_does_not_travel_is_not_said_to_be_compressed() -> None:
    plan = replace(PLAN, activations=replace(PLAN.activations, compress="int8"))
    sentences = explain_plan(plan, prediction=Cost(device_peak_bytes=340 * MIB, step_ms=118.0))
    assert "the numbers are those of plain fp32 training" in sentences
    assert not any("travels" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("without", "ending"),
    [
        (Cost(device_peak_bytes=440 * MIB, step_ms=97.0), "saves 100 MiB at the peak and costs 3.1 % of step time"),
        (Cost(device_peak_bytes=330 * MIB, step_ms=110.0), "adds 10.0 MiB to the peak and saves 9.1 % of step time"),
        (Cost(device_peak_bytes=340 * MIB, step_ms=100.0), "leaves the peak as it is and costs no time"),
    ],
)
def test_a_lever_is_said_to_be_worth_what_the_plan_would_be_without_it(without: Cost, ending: str) -> None:
    plan = replace(PLAN, logits_and_loss=LogitsAndLossPlan(num_chunks=4))
    cost = Cost(device_peak_bytes=340 * MIB, step_ms=100.0)
    sentences = explain_plan(plan, prediction=cost, without={"chunked_loss": without})
    assert f"logits and loss are computed in 4 chunks, never all at once; that {ending}" in sentences


def test_state_in_8_bits_says_what_it_saves_and_costs() -> None:
    plan = replace(PLAN, optimizer_state=OptimizerStatePlan(bits=8))
    cost = Cost(device_peak_bytes=340 * MIB, step_ms=100.4)
    without = {"8bit_optimizer": Cost(device_peak_bytes=440 * MIB, step_ms=100.0)}
    assert (
        "8-bit optimizer state saves 100 MiB at the peak and costs 0.4 % of step time; results differ slightly"
    ) in explain_plan(plan, prediction=cost, without=without)


@pytest.mark.parametrize(("exposed_ms", "ending"), [(0.0, ", hidden behind compute"), (2.0, "")])
def test_blocks_that_rebuild_and_move_say_what_each_is_worth(exposed_ms: float, ending: str) -> None:
    plan = replace(PLAN, activations=ActivationsPlan(per_block=("offload", "recompute", "selective", "keep")))
    cost = Cost(device_peak_bytes=340 * MIB, step_ms=110.0, exposed_copy_ms=exposed_ms)
    without = {
        "recompute": Cost(device_peak_bytes=440 * MIB, step_ms=100.0),
        "offload": Cost(device_peak_bytes=400 * MIB, step_ms=110.0),
    }
    sentences = explain_plan(plan, prediction=cost, without=without)
    assert "recomputing in 2 blocks saves 100 MiB at the peak and costs 10.0 % of step time" in sentences
    assert f"offloading the activations of 1 block saves 60.0 MiB at the peak and costs no time{ending}" in sentences


def test_levers_left_out_are_named_with_their_cost() -> None:
    assert describe_left_out("micro-batches of 4 instead of 8", device_change_bytes=63 * MIB, percent=3.0) == (
        "left out: to have micro-batches of 4 instead of 8 would add 63.0 MiB to the peak and cost 3.0 % of step time"
    )
    assert describe_left_out("offload every block", device_change_bytes=0, percent=3.0) == (
        "left out: to offload every block would save nothing at the peak and cost 3.0 % of step time"
    )
    assert describe_move_or_rebuild("offload", num_bytes=12 * MIB, move_ms=9, waits_ms=7, rebuild_ms=3) == (
        "offloading is left out: a block's 12.0 MiB take 9.0 ms to move each way, 7.0 ms of it not hidden, and 3.0 ms to rebuild"
    )


@pytest.mark.parametrize(
    ("data", "copies"),
    [("zero1", ", to all devices from one copy"), ("replicated", ", to all devices from one copy of those that are not trained")],
)
def test_weights_that_stream_to_several_devices_are_there_once(data: Any, copies: str) -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=2, data=data), weights=WeightsPlan(place="host"))
    sentences = explain_plan(plan, prediction=Cost(device_peak_bytes=MIB, step_ms=10.0, host_peak_bytes=3 * MIB))
    assert f"each block's weights come from the host as they are needed, one block ahead{copies}" in sentences
    assert "other memory holds up to 3.00 MiB on the host for each device" in sentences
    on_disk = explain_plan(replace(plan, weights=WeightsPlan(place="disk")), prediction=Cost(device_peak_bytes=MIB, step_ms=10.0))
    assert "each block's weights come from disk as they are needed, one block ahead" in on_disk


def test_weights_that_are_shared_out_among_devices_come_from_those_that_keep_them() -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=2, data="zero3"), weights=WeightsPlan(prefetch=2))
    sentences = explain_plan(plan, prediction=Cost(device_peak_bytes=MIB, step_ms=10.0))
    assert sentences[0].endswith("sends the others the weights of each block while it runs (ZeRO-3)")
    assert "each block's weights come from the devices that keep them as they are needed, 2 blocks ahead" in sentences
    away = different_cells([plan, replace(plan, layout=DeviceLayout(num_devices=2, data="zero2"))])
    assert [cell.values for cell in away] == [("fetched 2 ahead", "always there"), ("devices", "device")]


def test_several_devices_are_explained_with_what_they_send_and_wait_for() -> None:
    shared = replace(PLAN, layout=DeviceLayout(num_devices=2, data="zero1"))
    cost = Cost(device_peak_bytes=300 * MIB, step_ms=10.0, network_bytes=64 * MIB, exposed_ms={"network": 2.5})
    sentences = explain_plan(shared, prediction=cost)
    assert sentences[0].startswith("2 devices take a part of the batch each; each keeps the optimizer state of the tensors")
    assert sentences[1] == "each device sends 64.0 MiB to the others in a step; compute waits 2.5 ms for it"
    hidden = explain_plan(replace(PLAN, layout=DeviceLayout(num_devices=2)), prediction=replace(cost, exposed_ms={}))
    assert hidden[1].endswith("it hides behind compute")
    assert any(sentence.startswith("the part of each device of 8 runs as 4 micro-batches") for sentence in hidden)
    assert not any("device" in sentence for sentence in explain_plan(PLAN, prediction=cost)[:2])
