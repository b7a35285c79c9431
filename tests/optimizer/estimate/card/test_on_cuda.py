"""CUDA frees tensors that leave some time later, fetches tensors early, and its kernels hold scratch."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.estimate.card.allocations import Allocations
from optimizer.estimate.card.training_memory import add_memory, list_training_allocations
from optimizer.estimate.kernels.cuda_kernels import CudaKernels
from optimizer.estimate.kernels.held import NOTHING
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=4)


def make_plan(per_block: tuple[str, ...], **rows: Any) -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=4, accumulation_steps=1),
        activations=ActivationsPlan(per_block=per_block),
        **rows,
    )


@pytest.fixture
def card(machine: Machine) -> Machine:
    return replace(machine, device=table_machine("T4").device)


def hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaKernels, "hold_call", lambda *_, **__: NOTHING)
    monkeypatch.setattr(CudaKernels, "hold_norms", lambda *_, **__: NOTHING)


def list_both(profile: Profile, plan: Plan, machine: Machine, card: Machine) -> list[Allocations]:
    return [list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=m) for m in (machine, card)]


def test_offloaded_blocks_are_on_the_device_longer_than_on_the_cpu(
    profile: Profile, machine: Machine, card: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_nothing(monkeypatch)
    on_cpu, on_cuda = list_both(profile, make_plan(("offload",) * 4), machine, card)
    assert on_cuda.peak_bytes > on_cpu.peak_bytes
    both = [sum(num_bytes for _, num_bytes in found.second_step) for found in (on_cpu, on_cuda)]
    # Nothing is allocated twice: what comes early is not made again, scratch apart.
    assert both[1] - both[0] < 0.05 * both[0]


def test_tensors_that_stay_longer_are_freed_in_the_end(profile: Profile, card: Machine) -> None:
    plan = make_plan(("offload", "keep", "offload", "offload"))
    found = list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=card)
    live: set[Any] = set()
    for key, num_bytes in found.second_step:
        (live.add if num_bytes else live.discard)(key)
    assert not live


def test_without_offloading_and_scratch_both_devices_allocate_the_same(
    profile: Profile, machine: Machine, card: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_nothing(monkeypatch)
    on_cpu, on_cuda = list_both(profile, make_plan(("keep", "recompute", "selective", "keep")), machine, card)
    sizes = [sorted(num_bytes for _, num_bytes in found.second_step) for found in (on_cpu, on_cuda)]
    # Inputs go with their micro-batch on CUDA and stay on the CPU device.
    assert sizes[0] == sizes[1]


def test_copies_under_way_are_a_part_of_their_own(profile: Profile, card: Machine) -> None:
    plan = make_plan(("offload",) * 4)
    prediction = estimate_training(profile, plan=plan, workload=WORKLOAD, machine=card)
    memory = add_memory(prediction, profile, plan=plan, workload=WORKLOAD, machine=card).memory
    assert "copies under way, kernels' scratch" in {part.name for part in memory.parts}
    assert sum(part.num_bytes for part in memory.parts) == memory.process.value


def test_attention_backward_holds_scratch_while_it_runs(profile: Profile, card: Machine) -> None:
    plan = make_plan(("keep",) * 4, weights=WeightsPlan(dtype="fp16"))
    found = list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=card)
    # Four sequences of two heads 16 wide, in one tile of the memory-efficient kernel.
    expected = 4 * 8 * (4 + 64 * 64) + 4 * 8 * 64
    scratch = [index for index, (_, num_bytes) in enumerate(found.second_step) if num_bytes == expected]
    assert len(scratch) == 4
    assert all(found.second_step[index + 1] == (found.second_step[index][0], 0) for index in scratch)


def test_what_plain_attention_saves_stays_until_its_backward(profile: Profile, card: Machine) -> None:
    scores_bytes = 4 * 8 * 64 * 64
    kept_bytes = 4 * 8 * 3 * 64 * 16 + scores_bytes
    plan = make_plan(("keep", "recompute", "keep", "keep"), weights=WeightsPlan(dtype="bf16"))
    found = list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=card)
    most = 0
    live: set[Any] = set()
    kept = {key for key, num_bytes in found.second_step if num_bytes == kept_bytes}
    for key, num_bytes in found.second_step:
        (live.add if num_bytes else live.discard)(key)
        most = max(most, len(live & kept))
    # A recomputed block saves nothing in its first forward.
    assert (len(kept), most) == (4, 3)
    assert not live


def test_bounds_contain_the_likely_peak(profile: Profile, card: Machine) -> None:
    plan = make_plan(("keep",) * 4, weights=WeightsPlan(dtype="bf16"))
    found = list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=card)
    assert found.peak_low_bytes <= found.peak_bytes < found.peak_high_bytes
    prediction = estimate_training(profile, plan=plan, workload=WORKLOAD, machine=card)
    memory = add_memory(prediction, profile, plan=plan, workload=WORKLOAD, machine=card).memory
    assert memory.allocated.low <= found.peak_low_bytes
    assert memory.allocated.high >= found.peak_high_bytes
