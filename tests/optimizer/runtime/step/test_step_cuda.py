"""Twins on a card of test_step.py and test_weights.py: what leaves comes back right though copies and updates run beside compute.

The host's AdamW is another kernel than the card's, so state on the host is compared with itself: on a thread and at once.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.models.build import build_model
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import Adapter
from tests.left_out import NF4
from tests.optimizer.runtime.states import Ran, assert_same_bits, run_steps
from tests.optimizer.runtime.step.test_step import PLACES
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("prepared_card")]

CUDA = torch.device("cuda:0")
ADAPTER = Adapter(rank=4)


def run_placed(
    scratch: Path | None,
    plan: Plan,
    *,
    thread: bool | None = None,
    model: torch.nn.Module | None = None,
    **workload: Any,
) -> Ran:
    if model is None:
        device = CUDA if plan.weights.place == "device" else "cpu"
        model = build_model(make_spec(), dtype=torch_dtype(plan.weights), device=device, seed=3)
    trainer = Trainer(
        model,
        plan=plan,
        workload=make_workload(global_batch_size=plan.batch.global_batch_size, **workload),
        device=CUDA,
        meter=Meter(device=CUDA),
        scratch=scratch,
        updates_on_thread=thread,
    )
    try:
        return run_steps(trainer, num_steps=5)
    finally:
        trainer.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_on_the_host_give_the_bits_of_the_device(tmp_path: Path, dtype: str) -> None:
    runs = [
        run_placed(tmp_path, make_plan(dtype=dtype, accumulation_steps=1, gradients=choice), max_grad_norm=None)
        for choice in ("keep", "host")
    ]
    for key, weight in runs[0].weights.items():
        assert torch.equal(runs[1].weights[key], weight), key


@pytest.mark.parametrize("max_grad_norm", [0.1, None])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_updates_beside_compute_give_the_bits_of_updates_in_turn(
    tmp_path: Path, places: dict[str, Any], dtype: str, max_grad_norm: float
) -> None:
    plan = make_plan("offload", "keep", "recompute", dtype=dtype, accumulation_steps=2, **places)
    at_once, beside = (
        run_placed(tmp_path, plan, thread=thread, max_grad_norm=max_grad_norm) for thread in (False, True)
    )
    assert_same_bits(beside, at_once)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_state_on_the_host_trains_as_state_on_the_card_does(tmp_path: Path, places: dict[str, Any]) -> None:
    on_card = run_placed(tmp_path, make_plan())
    elsewhere = run_placed(tmp_path, make_plan(**places))
    # Adam's first steps have the size of the learning rate whatever the gradient; kernels differ in the last bits.
    for key, weight in on_card.weights.items():
        assert torch.allclose(elsewhere.weights[key].cpu(), weight.cpu(), atol=2e-4), key


@pytest.mark.parametrize("frozen", ["same", "int8", "int4", NF4])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_frozen_weights_stream_under_adapters_with_the_bits_of_resident_ones(
    tmp_path: Path, frozen: str, place: str
) -> None:
    runs = []
    for weights in (WeightsPlan(frozen=frozen), WeightsPlan(frozen=frozen, place=place)):
        model = build_prepared(make_spec(), weights=weights, workload=make_workload(adapter=ADAPTER), device=CUDA)
        plan = dataclasses.replace(make_plan(), weights=weights)
        runs.append(run_placed(tmp_path, plan, model=model, adapter=ADAPTER))
    assert_same_bits(*reversed(runs))
