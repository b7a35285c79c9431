"""Selective recomputation gives the bits of keeping, runs no product twice, and keeps nothing that it does not need."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from optimizer.formats.op_costs import classify_op
from optimizer.formats.run_again import cheap_to_run_again
from optimizer.models.anatomy import find_anatomy, find_blocks
from optimizer.models.build import build_model
from optimizer.plan.activations import ActivationsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.activations import apply_activations
from optimizer.runtime.step.selective import make_selective_contexts
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.tiny import NUM_BLOCKS, make_plan, make_spec, make_workload

CPU = torch.device("cpu")
HIDDEN_BYTES = 2 * 32 * 64 * 4
"""Bytes of one tensor of hidden states in the tiny models, fp32."""


class Counting(TorchDispatchMode):
    """Counts how many times each kind of op really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> bool | torch.Tensor | tuple[torch.Tensor, ...]:
        kind = classify_op(str(func))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def run_step(
    name: str, choices: tuple[str, ...], *, dtype: str = "fp32"
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, int], torch.Tensor]:
    """Loss, gradients and weights after two micro-batches, and the ops that ran."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    model = build_model(make_spec(name), seed=3, dtype=dtypes[dtype])
    plan, workload = make_plan(*choices, accumulation_steps=2, dtype=dtype), make_workload(global_batch_size=4)
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=Meter(device=CPU))
    torch.manual_seed(5)
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    with Counting() as counting, trainer.metered():
        loss = trainer.accumulate(batches)
    trainer.close()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return loss, gradients, counting.counts, torch.get_rng_state()


@pytest.mark.breadth
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_the_bits_are_those_of_keeping(name: str, dtype: str) -> None:
    loss, gradients, _, random_state = run_step(name, ("keep",), dtype=dtype)
    for choices in (("selective",), ("selective", "offload", "keep"), ("recompute", "selective", "selective")):
        other_loss, other_gradients, _, other_random_state = run_step(name, choices, dtype=dtype)
        assert torch.equal(other_loss, loss), choices
        assert all(torch.equal(other_gradients[key], gradients[key]) for key in gradients), choices
        assert torch.equal(other_random_state, random_state), choices


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_no_product_and_no_attention_runs_twice(name: str) -> None:
    kept, selective, recomputed = (run_step(name, (choice,))[2] for choice in ("keep", "selective", "recompute"))
    for kind in ("matmul", "attention"):
        assert selective.get(kind) == kept.get(kind)
    assert recomputed["matmul"] > selective["matmul"]
    assert selective["memory"] > kept["memory"]


def test_less_is_kept_than_by_torchs_own_contexts_by_each_blocks_last_product() -> None:
    costly = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    torchs_own = functools.partial(create_selective_checkpoint_contexts, costly)
    ours, theirs = (activation_bytes_after_forward(contexts) for contexts in (make_selective_contexts, torchs_own))
    assert theirs - ours == NUM_BLOCKS * HIDDEN_BYTES


def test_after_backward_nothing_is_kept() -> None:
    model = build_model(make_spec())
    meter = Meter(device=CPU)
    plan, workload = make_plan("selective"), make_workload()
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter)
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    trainer.step(batches, learning_rate=1e-3)
    assert meter.bytes_by_category()["activations"] == 0


def test_a_result_that_was_written_to_is_made_anew() -> None:
    block = _WritesToItsProduct()
    hidden = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    expected = _gradient_of(block, hidden)
    undo = apply_activations([block], ActivationsPlan(per_block=("selective",)), Tiers(device=CPU))
    assert torch.equal(_gradient_of(block, hidden), expected)
    undo()


def test_products_marked_as_cheap_run_again_and_others_do_not() -> None:
    def multiply(hidden: torch.Tensor) -> torch.Tensor:
        with cheap_to_run_again():
            squared = hidden @ hidden
        return ((squared.exp() @ hidden).exp() @ hidden).exp()

    hidden = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).div_(4).requires_grad_()
    (expected,) = torch.autograd.grad(multiply(hidden).sum(), hidden)
    with Counting() as counting:
        result: Any = _checkpointed(multiply, make_selective_contexts, hidden)
        assert counting.counts["matmul"] == 3
        result.grad_fn._saved_result  # noqa: B018
    assert counting.counts["matmul"] == 4
    (actual,) = torch.autograd.grad(_checkpointed(multiply, make_selective_contexts, hidden).sum(), hidden)
    assert torch.equal(actual, expected)


def test_attention_with_dropout_runs_again_so_that_later_draws_are_the_same() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    for dropout, num_runs in ((0.0, 1), (0.1, 2)):
        query = torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with Counting() as counting:
            result = checkpoint(
                lambda query, dropout=dropout: torch.exp(attention(query, query, query, dropout)[0]),
                query,
                use_reentrant=False,
                context_fn=make_selective_contexts,
            )
            assert counting.counts["attention"] == 1
            # what autograd asks for first: the second run
            result.grad_fn._saved_result  # noqa: B018
        assert counting.counts["attention"] == num_runs


def test_a_block_that_does_something_else_on_its_second_run_is_named() -> None:
    block = _Fickle()
    apply_activations([block], ActivationsPlan(per_block=("selective",)), Tiers(device=CPU))
    total = block(torch.randn(4, 4, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="ran aten.bmm.default on its second run"):
        total.backward()


def test_without_gradients_nothing_is_wrapped() -> None:
    model = build_model(make_spec()).eval()
    ids = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad():
        expected = model(ids).logits
        apply_activations(find_blocks(model), make_plan("selective").activations, Tiers(device=CPU))
        assert torch.equal(model(ids).logits, expected)


def activation_bytes_after_forward(contexts: Callable[..., Any]) -> int:
    model = build_model(make_spec())
    for block in find_blocks(model):
        forward = block.forward
        block.forward = functools.partial(_checkpointed, forward, contexts)
    meter = Meter(device=CPU)
    meter.assign_module(model)
    anatomy = find_anatomy(model)
    with meter, meter.region("activations"):
        hidden = anatomy.backbone(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False).last_hidden_state
    num_bytes = meter.bytes_by_category()["activations"]
    del hidden
    return num_bytes


def _checkpointed(
    forward: Callable[..., Any], contexts: Callable[..., Any], hidden: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    return checkpoint(forward, hidden, use_reentrant=False, context_fn=contexts, **kwargs)


def _gradient_of(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.clone().requires_grad_()
    block(hidden).sum().backward()
    return hidden.grad


class _WritesToItsProduct(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product = hidden @ hidden
        grown = product * 2
        product.add_(1)
        return torch.exp(product) * grown


class _Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_runs = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        self.num_runs += 1
        if self.num_runs == 1:
            return torch.exp(torch.exp(hidden @ hidden))
        return torch.exp(torch.exp(torch.bmm(hidden[None], hidden[None])[0]))
