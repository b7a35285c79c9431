"""Lower precision stays near fp32, and fp16's loss scale finds its size, leaves overflows out and survives a checkpoint."""

import dataclasses
from typing import Any

import pytest
import torch

from optimizer.base.errors import CheckpointInvalid, LossNotFinite
from optimizer.models.build import build_model
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.precision import GROWTH_STEPS, HIGHEST_HALF_SCALE, INITIAL_SCALE, Precision
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload

CPU = torch.device("cpu")
REPRESENTATIONS = {
    "bf16": (WeightsPlan(dtype="bf16"), 0.03),
    "fp16": (WeightsPlan(dtype="fp16"), 0.004),
    "fp32+bf16": (WeightsPlan(autocast="bf16"), 0.03),
    "fp32+fp16": (WeightsPlan(autocast="fp16"), 0.004),
}
"""Settings and a bound on the gradients' error, as a share of their norm: eight times one number's rounding (2^-8, 2^-11)."""
MAX_CURVE_GAPS = {"bf16": 0.05, "fp16": 0.02, "fp32+bf16": 0.02, "fp32+fp16": 0.02}
"""Largest gap of the loss over twelve steps, against fp32; the curve itself falls by more than 1. With bf16 weights the loss is
itself a bf16 number, which between 4 and 8 come in steps of 1/32."""


def make_trainer(
    weights: WeightsPlan, choice: str = "keep", *, name: str = "llama", accumulation_steps: int = 1, **workload: Any
) -> Trainer:
    model = build_model(make_spec(name), seed=3, dtype=torch_dtype(weights))
    plan = dataclasses.replace(make_plan(choice, accumulation_steps=accumulation_steps), weights=weights)
    training = make_workload(global_batch_size=2 * accumulation_steps, **workload)
    return Trainer(model, plan=plan, workload=training, device=CPU, meter=Meter(device=CPU))


def make_batches(trainer: Trainer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)


def flat_gradients(weights: WeightsPlan, *, name: str = "llama") -> torch.Tensor:
    trainer = make_trainer(weights, name=name)
    torch.manual_seed(5)
    trainer.accumulate(make_batches(trainer))
    scale = trainer.precision.scale
    return torch.cat([p.grad.flatten().float() / scale for p in trainer.model.parameters()])


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_are_within_the_bound_of_fp32s(name: str, representation: str) -> None:
    weights, bound = REPRESENTATIONS[representation]
    exact, rounded = flat_gradients(WeightsPlan(), name=name), flat_gradients(weights, name=name)
    assert 0 < float((rounded - exact).norm() / exact.norm()) < bound


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_the_training_curve_is_fp32s_within_the_gap(representation: str) -> None:
    exact, lower = (_losses(weights) for weights in (WeightsPlan(), REPRESENTATIONS[representation][0]))
    assert exact[0] - exact[-1] > 1
    assert max(abs(a - b) for a, b in zip(exact, lower, strict=True)) < MAX_CURVE_GAPS[representation]


def _losses(weights: WeightsPlan) -> list[float]:
    trainer = make_trainer(weights)
    batches = make_batches(trainer)
    return [trainer.step(batches, learning_rate=3e-3).loss for _ in range(12)]


@pytest.mark.breadth
@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("choice", ["recompute", "selective", "offload"])
def test_the_bits_are_those_of_keeping_in_every_representation(representation: str, choice: str) -> None:
    weights, _ = REPRESENTATIONS[representation]
    found = []
    for each in ("keep", choice):
        trainer = make_trainer(weights, each, accumulation_steps=2)
        result = trainer.step(make_batches(trainer), learning_rate=1e-3)
        found.append((result.loss, result.grad_norm, [p.detach() for p in trainer.model.parameters()]))
    (loss, norm, kept), (other_loss, other_norm, others) = found
    assert (loss, norm) == (other_loss, other_norm)
    assert all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))


def test_autocast_holds_no_cast_of_a_weight_after_a_recomputed_forward() -> None:
    left_bytes = []
    for autocast in ("off", "bf16"):
        trainer = make_trainer(WeightsPlan(autocast=autocast), "recompute")
        ((ids, _),) = make_batches(trainer)
        backbone = trainer.anatomy.backbone
        with trainer.metered(), trainer.meter.region("activations"), trainer.precision.autocast():
            hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
            left_bytes.append(trainer.meter.bytes_by_category()["activations"])
        del hidden
    assert left_bytes[0] == left_bytes[1]


def test_the_scale_by_itself_changes_no_bit() -> None:
    plain, scaled = make_trainer(WeightsPlan(), max_grad_norm=None), make_trainer(WeightsPlan(), max_grad_norm=None)
    scaled.precision.scales_loss, scaled.precision.scale = True, INITIAL_SCALE
    for trainer in (plain, scaled):
        result = trainer.step(make_batches(trainer), learning_rate=1e-3)
    assert result.loss_scale == INITIAL_SCALE
    for a, b in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_overflows_is_left_out_and_halves_the_scale() -> None:
    trainer = make_trainer(WeightsPlan(autocast="fp16"))
    trainer.precision.scale = 2.0**60
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    result = trainer.step(make_batches(trainer), learning_rate=1e-3)
    assert (result.is_left_out, result.loss_scale) == (True, 2.0**60)
    assert trainer.precision.scale == 2.0**59
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


def test_the_first_step_of_fp16_is_not_lost() -> None:
    trainer = make_trainer(WeightsPlan(dtype="fp16"))
    result = trainer.step(make_batches(trainer), learning_rate=1e-3)
    assert (result.is_left_out, result.loss_scale) == (False, HIGHEST_HALF_SCALE)


def test_the_scale_doubles_after_good_steps_in_a_row_up_to_what_the_loss_can_hold() -> None:
    for plan, highest in (
        (WeightsPlan(autocast="fp16"), INITIAL_SCALE * 2),
        (WeightsPlan(dtype="fp16"), HIGHEST_HALF_SCALE),
    ):
        precision = Precision(plan, device=CPU)
        for _ in range(GROWTH_STEPS - 1):
            precision.update(overflowed=False)
        before = precision.scale
        precision.update(overflowed=False)
        assert (before, precision.scale) == (highest if plan.dtype == "fp16" else highest / 2, highest)


def test_steps_that_overflow_without_end_are_a_loss_that_is_not_finite() -> None:
    precision = Precision(WeightsPlan(autocast="fp16"), device=CPU)
    for _ in range(16):
        precision.update(overflowed=True)
    with pytest.raises(LossNotFinite, match="overflow fp16 even at a loss scale of 1, after 16 steps left out"):
        precision.update(overflowed=True)


def test_weights_that_are_not_finite_end_an_fp16_run_by_name() -> None:
    trainer = make_trainer(WeightsPlan(dtype="fp16"))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    trainer.precision.scale = 2.0
    assert trainer.step(make_batches(trainer), learning_rate=1e-3).is_left_out
    with pytest.raises(LossNotFinite, match="overflow fp16 even at a loss scale of 1, after 1 steps left out"):
        trainer.step(make_batches(trainer), learning_rate=1e-3)


def test_the_scale_survives_a_checkpoint() -> None:
    plan = WeightsPlan(autocast="fp16")
    precision, resumed = Precision(plan, device=CPU), Precision(plan, device=CPU)
    precision.update(overflowed=True)
    precision.update(overflowed=False)
    resumed.import_state(precision.export_state())
    assert resumed.export_state() == precision.export_state() == {"scale": 2.0**15, "good_steps": 1, "num_overflows": 1}


def test_a_scale_that_the_plan_does_not_use_is_refused() -> None:
    state = Precision(WeightsPlan(autocast="fp16"), device=CPU).export_state()
    with pytest.raises(CheckpointInvalid, match="loss scale is 65536, which the plan's precision does not use"):
        Precision(WeightsPlan(), device=CPU).import_state(state)
