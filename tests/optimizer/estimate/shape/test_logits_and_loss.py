"""The price of a head in chunks is what the runtime's meter counts, to the byte, whatever the head is like."""

import dataclasses
from typing import Any

import pytest

from optimizer.estimate.shape.compiled import compile_shape
from optimizer.estimate.shape.logits_and_loss import (
    HEAD_PARTS,
    ChunkedHead,
    Head,
    estimate_chunked_head,
    list_backward,
    list_forward,
    read_head,
)
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine, Processor
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

SHAPE = (2, 40)


def make_plan(num_chunks: int, *, dtype: str = "fp32", accumulation_steps: int = 1) -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=SHAPE[0], accumulation_steps=accumulation_steps),
        weights=WeightsPlan(dtype=dtype),
        activations=ActivationsPlan(per_block=("recompute",) * 4),
        logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks),
    )


def price(profile: Profile, machine: Machine, plan: Plan) -> ChunkedHead | None:
    compiled = compile_shape(profile, plan.weights, SHAPE)
    return estimate_chunked_head(profile, compiled, plan=plan, machine=machine)


def highest(changes: list[tuple[str, int]]) -> tuple[int, int]:
    level = top = 0
    for _, num_bytes in changes:
        level += num_bytes
        top = max(top, level)
    return top, level


@pytest.fixture(scope="module")
def plain_head(profile: Profile) -> Head:
    compiled = compile_shape(profile, WeightsPlan(), SHAPE)
    return read_head(profile, compiled, weight_element_bytes=4)


def test_one_chunk_is_the_traced_head(profile: Profile, machine: Machine) -> None:
    assert price(profile, machine, make_plan(1)) is None


def test_the_head_is_read_off_the_traced_parts(plain_head: Head) -> None:
    assert (plain_head.width, plain_head.vocabulary, plain_head.num_tokens) == (32, 131, 80)
    assert plain_head.trains_weight
    assert plain_head.is_tied
    assert not plain_head.has_cap
    assert not plain_head.has_bias


HEADS: dict[str, Any] = {
    "fp32": {},
    "a bias": {"has_bias": True, "trains_bias": True},
    "a soft cap": {"has_cap": True},
    "frozen": {"trains_weight": False, "is_tied": False},
    "bf16": {"product_bytes": 2, "hidden_element_bytes": 2, "weight_element_bytes": 2},
    "bf16 with a soft cap": {
        "product_bytes": 2,
        "hidden_element_bytes": 2,
        "weight_element_bytes": 2,
        "has_cap": True,
    },
    "autocast": {"product_bytes": 2},
    "autocast with a soft cap and a bias": {
        "product_bytes": 2,
        "has_cap": True,
        "has_bias": True,
        "trains_bias": True,
    },
}


@pytest.mark.parametrize("num_chunks", [2, 7, 80])
@pytest.mark.parametrize("name", list(HEADS))
def test_bytes_of_forward_and_backward_are_those_that_the_meter_counts(
    plain_head: Head, name: str, num_chunks: int
) -> None:
    import torch

    from optimizer.runtime.meter.meter import Meter
    from optimizer.runtime.step.logits_and_loss import chunked_cross_entropy

    head = dataclasses.replace(plain_head, **HEADS[name])
    dtype = torch.bfloat16 if head.weight_element_bytes == 2 else torch.float32
    hidden = torch.randn(head.num_tokens, head.width, dtype=dtype, requires_grad=True)
    weight = torch.randn(head.vocabulary, head.width, dtype=dtype, requires_grad=head.trains_weight)
    bias = torch.randn(head.vocabulary, dtype=dtype, requires_grad=True) if head.has_bias else None
    labels = torch.randint(head.vocabulary, (head.num_tokens,))
    options = {"num_chunks": num_chunks, "bias": bias, "soft_cap": 5.0 if head.has_cap else None}
    with Meter(device=torch.device("cpu")) as meter:
        for tensor in (hidden, weight, labels, *([bias] if head.has_bias else [])):
            meter.assign(tensor, "weights")
        start_bytes = meter.device_bytes
        meter.reset_peak()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=head.is_autocast):
            # The runtime's step too divides the loss by the number of micro-batches.
            loss = chunked_cross_entropy(hidden, weight, labels, **options) / 1
        forward = list_forward(head, num_chunks).changes
        top, net = highest([change for change in forward if change[0] == "logits_and_loss"])
        assert meter.peak().device_bytes - start_bytes == top
        assert meter.device_bytes - start_bytes == net
        middle_bytes = meter.device_bytes
        meter.reset_peak()
        loss.backward()
        top, net = highest(list_backward(head, adds=False))
        assert meter.peak().device_bytes - middle_bytes == top
        # Backward's own root is gone here; in a step it goes with the last part.
        assert meter.device_bytes - middle_bytes == net - head.wide_bytes


@pytest.mark.breadth
@pytest.mark.parametrize("num_chunks", [2, 80])
@pytest.mark.parametrize(("dtype", "accumulation_steps"), [("fp32", 1), ("fp32", 2), ("bf16", 3)])
def test_the_peak_of_a_step_in_chunks_is_what_the_meter_counts(
    spec: ModelSpec, profile: Profile, machine: Machine, dtype: str, accumulation_steps: int, num_chunks: int
) -> None:
    from optimizer.runtime.job.measure import measure_step

    plan = make_plan(num_chunks, dtype=dtype, accumulation_steps=accumulation_steps)
    workload = TrainingWorkload(sequence_length=SHAPE[1], global_batch_size=plan.batch.global_batch_size)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    measured = measure_step(spec, plan=plan, workload=workload)
    assert predicted.device_peak_bytes == measured.device_peak_bytes


def test_more_chunks_take_less_memory_and_more_time(profile: Profile, machine: Machine) -> None:
    prices = [price(profile, machine, make_plan(num_chunks)) for num_chunks in (2, 4, 8)]
    rises = [found.bytes["head"].rise for found in prices]
    times = [found.time["head"].compute_ms for found in prices]
    assert rises == sorted(rises, reverse=True)
    assert times == sorted(times)


def test_every_head_part_has_a_price_and_backward_without_a_gradient_leaves_one(
    profile: Profile, machine: Machine
) -> None:
    found = price(profile, machine, make_plan(4))
    assert set(found.bytes) == set(found.time) == set(HEAD_PARTS)
    assert all(time.compute_ms > 0 for time in found.time.values())


@pytest.mark.parametrize(("dtype_bytes", "packs"), [(4, {"packs_fp32": True}), (2, {"packs_bf16": True})])
def test_what_a_library_lays_out_for_a_chunks_products_comes_on_top(
    plain_head: Head, dtype_bytes: int, packs: dict[str, Any]
) -> None:
    sizes = dict.fromkeys(("product_bytes", "hidden_element_bytes", "weight_element_bytes"), dtype_bytes)
    head = dataclasses.replace(plain_head, num_tokens=512, width=128, vocabulary=512, has_bias=False, **sizes)
    products = list_forward(head, 2).products
    assert [(product.form, product.sides) for product in products] == [
        ("nt", (256, 128, 512)), ("nn", (256, 512, 128)), ("tn", (512, 256, 128)),
    ]  # fmt: skip
    assert products[-1].is_added == (dtype_bytes == 4)
    for product in products:
        assert product.allocated_bytes(Processor(2)) == product.level_bytes < product.allocated_bytes(Processor(2, **packs))
