"""CUDA frees tensors that leave some time later, fetches tensors early, and its kernels hold scratch."""

from dataclasses import replace

import pytest

from optimizer.estimate.card.kernel_scratch import scratch_bytes
from optimizer.estimate.card.process import add_memory
from optimizer.estimate.card.training_allocations import list_training_allocations
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import table_machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=4)
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def make_plan(per_block, **rows):
    return Plan(
        batch=BatchPlan(micro_batch_size=4, accumulation_steps=1),
        activations=ActivationsPlan(per_block=per_block),
        **rows,
    )


@pytest.fixture
def card(machine):
    return replace(machine, device=table_machine("T4").device)


def list_both(profile, plan, machine, card):
    return [list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=m) for m in (machine, card)]


def test_offloaded_blocks_are_on_the_device_longer_than_on_the_cpu(profile, machine, card):
    on_cpu, on_cuda = list_both(profile, make_plan(("offload",) * 4), machine, card)
    assert on_cuda.peak_bytes > on_cpu.peak_bytes
    both = [sum(num_bytes for _, num_bytes in found.second_step) for found in (on_cpu, on_cuda)]
    # Nothing is allocated twice: what comes early is not made again, scratch apart.
    assert both[1] - both[0] < 0.05 * both[0]


def test_what_stays_longer_goes_in_the_end(profile, card):
    plan = make_plan(("offload", "keep", "offload", "offload"))
    found = list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=card)
    live = set()
    for key, num_bytes in found.second_step:
        (live.add if num_bytes else live.discard)(key)
    assert not live


def test_without_offloading_and_scratch_both_devices_allocate_the_same(profile, machine, card, monkeypatch):
    monkeypatch.setattr("optimizer.estimate.card.on_cuda.scratch_bytes", lambda *_, **__: 0)
    on_cpu, on_cuda = list_both(profile, make_plan(("keep", "recompute", "selective", "keep")), machine, card)
    sizes = [sorted(num_bytes for _, num_bytes in found.second_step) for found in (on_cpu, on_cuda)]
    # Inputs go with their micro-batch on CUDA and stay on the CPU device.
    assert sizes[0] == sizes[1]


def test_copies_under_way_are_a_part_of_their_own(profile, card):
    plan = make_plan(("offload",) * 4)
    prediction = estimate_training(profile, plan=plan, workload=WORKLOAD, machine=card)
    memory = add_memory(prediction, profile, plan=plan, workload=WORKLOAD, machine=card).memory
    assert "copies under way, kernels' scratch" in {part.name for part in memory.parts}
    assert sum(part.num_bytes for part in memory.parts) == memory.process.value


def test_attention_backward_holds_scratch_while_it_runs(profile, card):
    plan = make_plan(("keep",) * 4, weights=WeightsPlan(dtype="bf16"))
    found = list_training_allocations(profile, plan=plan, workload=WORKLOAD, machine=card)
    query_elements = 4 * 64 * 32
    expected = 4 * query_elements + 4 * query_elements // 64
    scratch = [index for index, (_, num_bytes) in enumerate(found.second_step) if num_bytes == expected]
    assert len(scratch) == 4
    assert all(found.second_step[index + 1] == (found.second_step[index][0], 0) for index in scratch)


def test_scratch_of_grouped_heads_holds_every_query_heads_keys_and_values():
    queries, keys = 1 << 20, 1 << 18
    grouped = scratch_bytes(ATTENTION_BACKWARD, (queries, keys, keys), element_bytes=2, num_tokens=1)
    equal = scratch_bytes(ATTENTION_BACKWARD, (queries, queries, queries), element_bytes=2, num_tokens=1)
    assert grouped - equal == 2 * queries


def test_attention_in_fp32_adds_up_in_its_result():
    assert scratch_bytes(ATTENTION_BACKWARD, (1 << 20,) * 3, element_bytes=4, num_tokens=1) == (1 << 20) // 64


@pytest.mark.parametrize(("num_tokens", "expected"), [(3072, 0), (3073, 40 * 3073)])
def test_embeddings_sort_their_ids_above_a_number_of_tokens(num_tokens, expected):
    name = "aten.embedding_dense_backward.default"
    assert scratch_bytes(name, (1 << 20,), element_bytes=2, num_tokens=num_tokens) == expected


def test_other_ops_and_forward_passes_hold_nothing():
    for name in ("aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default", ""):
        assert scratch_bytes(name, (1 << 20,), element_bytes=2, num_tokens=10_000) == 0
