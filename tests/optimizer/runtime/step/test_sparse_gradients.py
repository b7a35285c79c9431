"""Sparse gradients of embeddings: the dense ones' rows, lazily updated, and resumed to the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.base.errors import CheckpointInvalid, InvalidModel, InvalidPlan
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.optimizer_state import Optimizer
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

CPU = torch.device("cpu")
TABLE = "model.embed_tokens.weight"
CONFIG: dict[str, Any] = {
    "model_type": "headroom_decoder",
    "vocab_size": 997,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "sparse_embedding_gradients": True,
}
SPEC = read_model_spec(CONFIG)
DENSE_SPEC = read_model_spec({**CONFIG, "sparse_embedding_gradients": False})
WORKLOAD = TrainingWorkload(sequence_length=24, global_batch_size=4, learning_rate=0.01, max_grad_norm=0.05)

REFUSED = [
    ("gradients.choice", {"gradients": GradientsPlan(choice="host")}),
    ("optimizer_state.bits", {"optimizer_state": OptimizerStatePlan(bits=8)}),
    ("weights.dtype", {"weights": WeightsPlan(dtype="bf16")}),
    (
        "gradients.choice",
        {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")},
    ),
    ("gradients.choice", {"gradients": GradientsPlan(choice="consume")}),
]
"""The field that is named, and the rows of a plan."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_plan(accumulation_steps: int = 1, *, choice: str = "keep", **rows: Any) -> Plan:
    micro_batch_size = 4 // accumulation_steps
    return Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
        activations=ActivationsPlan(per_block=(choice,) * 2),
        **rows,
    )


def make_model(spec: ModelSpec = SPEC) -> nn.Module:
    torch.manual_seed(3)
    return build_model(spec)


def make_trainer(
    model: nn.Module, plan: Plan | None = None, *, workload: TrainingWorkload = WORKLOAD, meter: Any = None
) -> Trainer | None:
    return Trainer(model, plan=plan or make_plan(), workload=workload, device=CPU, meter=meter)


def make_batches(
    accumulation_steps: int = 1, *, seed: int = 0, num_tokens: int = 40
) -> list[tuple[torch.Tensor, ...]]:
    """Make batches of few tokens, so that rows repeat within and between micro-batches, and most rows are not touched."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4 // accumulation_steps, WORKLOAD.sequence_length)
    return [
        tuple(torch.randint(num_tokens, shape, generator=generator) for _ in range(2))
        for _ in range(accumulation_steps)
    ]


def clipped_gradient(spec: ModelSpec, accumulation_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = make_model(spec)
    trainer = make_trainer(model, make_plan(accumulation_steps))
    trainer.accumulate(make_batches(accumulation_steps))
    clipped = trainer.gradients.clip_(WORKLOAD.max_grad_norm)
    return model.get_parameter(TABLE).grad, clipped.norm


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_the_gradient_and_the_global_norm_are_the_dense_ones(accumulation_steps: int) -> None:
    sparse, sparse_norm = clipped_gradient(SPEC, accumulation_steps)
    dense, dense_norm = clipped_gradient(DENSE_SPEC, accumulation_steps)
    assert sparse.is_sparse
    assert sparse.is_coalesced()
    assert sparse._nnz() <= 40
    torch.testing.assert_close(sparse.to_dense(), dense, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(sparse_norm, dense_norm, rtol=1e-6, atol=0.0)
    assert float(sparse_norm) > WORKLOAD.max_grad_norm


def lazy_adamw(
    weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, gradient: torch.Tensor, *, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute lazy AdamW by hand, in fp64."""
    w = WORKLOAD
    weight = weight * (1 - w.learning_rate * w.weight_decay)
    mean = w.beta1 * mean + (1 - w.beta1) * gradient
    square = w.beta2 * square + (1 - w.beta2) * gradient**2
    divisor = (square / (1 - w.beta2**step)).sqrt() + w.epsilon
    return weight - w.learning_rate * (mean / (1 - w.beta1**step)) / divisor, mean, square


def test_steps_are_lazy_adamw_by_hand_and_untouched_rows_keep_their_bits() -> None:
    model = make_model()
    trainer = make_trainer(model)
    table = model.get_parameter(TABLE)
    weight = table.detach().to(torch.float64)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in (1, 2, 3):
        batches, before = make_batches(seed=step, num_tokens=20 * step), table.detach().clone()
        state: dict[str, Any] = trainer.optimizer.export_state()[0]
        moments = {key: value.clone() for key, value in state.items() if TABLE in key}
        trainer.accumulate(batches)
        trainer.gradients.clip_(WORKLOAD.max_grad_norm)
        gradient = table.grad.to_dense().to(torch.float64)
        trainer.optimizer.step(WORKLOAD.learning_rate)
        trainer.optimizer.zero_grad()
        touched = batches[0][0].unique()
        news = lazy_adamw(weight[touched], mean[touched], square[touched], gradient[touched], step=step)
        for whole, rows in zip((weight, mean, square), news, strict=True):
            whole[touched] = rows
        after: dict[str, Any] = trainer.optimizer.export_state()[0]
        torch.testing.assert_close(table.detach().to(torch.float64), weight, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(after[f"{TABLE}//exp_avg"].to(torch.float64), mean, rtol=1e-5, atol=1e-9)
        rest = torch.ones(997, dtype=torch.bool).index_fill(0, touched, False)
        assert torch.equal(table.detach()[rest], before[rest])
        for key in ("exp_avg", "exp_avg_sq") if moments else ():
            assert torch.equal(after[f"{TABLE}//{key}"][rest], moments[f"{TABLE}//{key}"][rest])


def test_where_every_row_is_touched_it_is_adamw_to_the_bit() -> None:
    torch.manual_seed(0)
    every = torch.arange(7)
    tables = [nn.Embedding(7, 16, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [Optimizer(table, plan=OptimizerStatePlan(), workload=WORKLOAD) for table in tables]
    for _ in range(3):
        for table, optimizer in zip(tables, optimizers, strict=True):
            table(every).pow(2).sum().backward()
            if table.sparse:
                table.weight.grad = table.weight.grad.coalesce()
            optimizer.step(0.01)
            optimizer.zero_grad()
    assert torch.equal(tables[0].weight, tables[1].weight)


def test_a_step_from_stored_state_gives_the_same_bits() -> None:
    model = make_model()
    trainer = make_trainer(model, make_plan(2))
    trainer.step(make_batches(2, seed=1), learning_rate=0.01)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    exported: Any = trainer.optimizer.export_state()
    stored, scalars = exported
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    assert tensors[f"{TABLE}//exp_avg"].shape == (997, 32)
    assert tensors[f"{TABLE}//exp_avg"].layout == torch.strided
    trainer.step(make_batches(2, seed=2), learning_rate=0.01)

    again = make_model()
    resumed = make_trainer(again, make_plan(2))
    resumed.set_weights(weights)
    resumed.optimizer.import_state(tensors, scalars)
    resumed.step(make_batches(2, seed=2), learning_rate=0.01)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_state_of_another_kind_is_refused() -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(CheckpointInvalid, match=f"{TABLE}//state1"):
        trainer.optimizer.import_state({f"{TABLE}//state1": torch.zeros(997, 32)}, {})


@pytest.mark.parametrize(("field", "rows"), REFUSED)
def test_what_cannot_be_combined_is_refused_at_setup(field: str, rows: dict[str, Any]) -> None:
    plan, workload = make_plan(**rows), replace(WORKLOAD, max_grad_norm=None)
    with pytest.raises(InvalidPlan, match="sparse_embedding_gradients") as refused:
        make_trainer(make_model(), plan, workload=workload)
    assert refused.value.fields["field"] == f"plan.{field}"


def test_tied_embeddings_are_refused() -> None:
    with pytest.raises(InvalidModel, match="sparse_embedding_gradients"):
        read_model_spec({**CONFIG, "tie_word_embeddings": True})


def test_the_meter_counts_indices_and_values_as_gradients() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    meter = Meter(device=CPU)
    meter.assign_module(table)
    handles = meter.watch_gradients(table.parameters())
    ids = torch.tensor([[1, 2, 3], [1, 4, 5]])
    with meter:
        table(ids).mul(2).sum().backward()
        assert meter.bytes_by_category()["gradients"] == 6 * (8 * 4 + 8)
        table.weight.grad = table.weight.grad.coalesce()
        meter.assign(table.weight.grad, "optimizer_state")
        counted = meter.bytes_by_category()
        assert counted["gradients"] == 0
        assert counted["optimizer_state"] >= 5 * (8 * 4 + 8)
        table.weight.grad = None
    assert meter.bytes_by_category()["optimizer_state"] == 0
    for handle in handles:
        handle.remove()
