"""A plan around someone's own loop gives the bits of the program's own, and leaves the model as it was."""

from typing import Any

import pytest
import torch

from optimizer.base.errors import InvalidPlan, LossNotFinite, OutOfDeviceMemory
from optimizer.models.build import build_model
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.runtime.job.apply import apply
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload
from tests.optimizer.runtime.counted_card import counted_card
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload

CPU = torch.device("cpu")
NUM_STEPS = 3
PLANS = {
    "kept": make_plan(),
    "recomputed, selective, offloaded": make_plan("recompute", "selective", "offload"),
    "gradients and state on the host": make_plan(gradients="host", state_place="host"),
    "streamed from the disk, state on the disk": make_plan(
        "recompute", gradients="host", state_place="disk", weights_place="disk"
    ),
    "accumulated on the host": make_plan(
        gradients="host", state_place="host", micro_batch_size=1, accumulation_steps=2
    ),
}


def own_loop(
    plan: Plan, workload: TrainingWorkload, *, budget_bytes: Any = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build_model(make_spec(), seed=0)
    losses = []
    with apply(model, plan, workload=workload, budget_bytes=budget_bytes) as run:
        for _ in range(NUM_STEPS):
            for ids, labels in make_synthetic_batches(model, plan=plan, workload=workload):
                loss = run.compute_loss(ids, labels) / plan.batch.accumulation_steps
                loss.backward()
            losses.append(run.step().loss)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def programs_loop(plan: Plan, workload: TrainingWorkload) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build_model(make_spec(), seed=0)
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=None)
    losses = []
    for _ in range(NUM_STEPS):
        batches = make_synthetic_batches(model, plan=plan, workload=workload)
        losses.append(trainer.step(batches, learning_rate=workload.learning_rate).loss)
    trainer.close()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", PLANS)
def test_a_loop_of_ones_own_ends_with_the_bits_of_the_programs(name: str) -> None:
    workload = make_workload()
    losses, weights = own_loop(PLANS[name], workload)
    expected_losses, expected = programs_loop(PLANS[name], workload)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_gradients_consumed_in_backward_use_the_rate_of_the_loop() -> None:
    workload = make_workload(max_grad_norm=None)
    _, weights = own_loop(make_plan(gradients="consume"), workload)
    _, expected = programs_loop(make_plan(), workload)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_the_models_own_forward_with_labels_makes_the_planned_loss() -> None:
    model, workload = build_model(make_spec(), seed=0), make_workload()
    ids = torch.randint(512, (2, 16))
    expected = model(input_ids=ids, labels=ids).loss
    plan = make_plan()
    with apply(model, plan, workload=workload):
        output = model(input_ids=ids, labels=ids)
        assert output.logits is None
        assert torch.allclose(output.loss, expected, rtol=1e-6)
        assert model(input_ids=ids).logits.shape == (2, 16, 512)


def test_padded_sequences_are_masked_and_a_whole_steps_tokens_divide_the_loss() -> None:
    model, workload = build_model(make_spec(), seed=0), make_workload()
    ids = torch.randint(512, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, labels=labels, attention_mask=mask, num_items_in_batch=50).loss
    with apply(model, make_plan(), workload=workload):
        found = model(input_ids=ids, labels=labels, attention_mask=mask, num_items_in_batch=50).loss
    assert torch.allclose(found, expected, rtol=1e-6)


def test_a_step_ends_the_loop_by_what_only_a_cards_counters_saw() -> None:
    ids = torch.randint(512, (2, 16))
    with counted_card() as memory:
        model = build_model(make_spec(), seed=0)
        with apply(model, make_plan(), workload=make_workload(), budget_bytes=2**30) as run:
            run.compute_loss(ids, ids).backward()
            memory.spike(2**30 + 512)
            with pytest.raises(OutOfDeviceMemory, match="inside an op in .*: 512 B more were needed"):
                run.step()
            run.reset_peak()


def test_the_budget_counts_and_stops_the_loop() -> None:
    workload = make_workload()
    plan = make_plan()
    model = build_model(make_spec(), seed=0)
    ids = torch.randint(512, (2, 16))
    with apply(model, plan, workload=workload, budget_bytes=10**9) as run:
        run.compute_loss(ids, ids).backward()
        run.step()
        peak_bytes = run.peak().device_bytes
    assert peak_bytes > 4 * sum(p.numel() for p in model.parameters())
    with apply(build_model(make_spec(), seed=0), plan, workload=workload, budget_bytes=peak_bytes // 2) as run:
        loss = run.compute_loss(ids, ids)
        with pytest.raises(OutOfDeviceMemory, match="in backward of block 1 of 3"):
            loss.backward()


def test_afterwards_the_model_is_as_it_was_but_for_its_weights() -> None:
    model, workload = build_model(make_spec(), seed=0), make_workload()
    plan = make_plan("recompute", gradients="host", state_place="host", weights_place="host")
    before = {name for name, value in vars(model).items()}
    ids = torch.randint(512, (2, 16))
    with apply(model, plan, workload=workload) as run:
        run.compute_loss(ids, ids).backward()
        run.step()
    assert {name for name, value in vars(model).items()} == before
    assert "forward" not in vars(model)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert model(input_ids=ids, labels=ids).logits is not None


def test_one_micro_batch_too_many_is_refused() -> None:
    model, workload = build_model(make_spec(), seed=0), make_workload()
    ids = torch.randint(512, (2, 16))
    with apply(model, make_plan(), workload=workload) as run:
        run.compute_loss(ids, ids).backward()
        with pytest.raises(InvalidPlan, match="a step of 1 micro-batch; one more was begun"):
            run.compute_loss(ids, ids)


def test_a_loss_that_is_not_finite_leaves_the_weights_untouched() -> None:
    model: Any = build_model(make_spec(), seed=0)
    workload = make_workload()
    ids = torch.randint(512, (2, 16))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with apply(model, make_plan(), workload=workload) as run:
        run.compute_loss(ids, ids).backward()
        with pytest.raises(LossNotFinite, match="the loss became nan"):
            run.step()
    assert all(torch.equal(p, b) or p.isnan().sum() == 1 for p, b in zip(model.parameters(), before, strict=True))


def test_chunked_loss_in_ones_own_loop_lowers_the_peak() -> None:
    workload = make_workload()
    whole = make_plan()
    chunked = type(whole).from_json({**whole.to_json(), "logits_and_loss": {"num_chunks": 8}})
    assert chunked.logits_and_loss == LogitsAndLossPlan(num_chunks=8)
    peaks = []
    for plan in (whole, chunked):
        model = build_model(make_spec(), seed=0)
        ids = torch.randint(512, (2, 64))
        with apply(model, plan, workload=workload, budget_bytes=10**9) as run:
            run.compute_loss(ids, ids).backward()
            run.step()
            peaks.append(run.peak().device_bytes)
    assert peaks[1] < peaks[0]
