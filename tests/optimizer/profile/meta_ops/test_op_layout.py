"""A profile notes how a product's operands lie in memory and the dtype of what an op reads, as the real op has them."""

from collections import Counter

import pytest
import torch

from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.meta_ops.op_layout import dtype_of, form_of
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.trace.trace import profile_model
from optimizer.workload import TrainingWorkload

LEFT, RIGHT = torch.ones(4, 6), torch.ones(6, 5)


@pytest.mark.parametrize(
    ("name", "inputs", "form"),
    [
        ("aten.mm.default", (LEFT, RIGHT), "nn"),
        ("aten.mm.default", (LEFT, torch.ones(5, 6).t()), "nt"),
        ("aten.mm.default", (torch.ones(6, 4).t(), RIGHT), "tn"),
        ("aten.addmm.default", (torch.ones(5), LEFT, torch.ones(5, 6).t()), "nt"),
        ("aten.bmm.default", (torch.ones(3, 4, 6), torch.ones(3, 5, 6).transpose(1, 2)), "nt"),
        ("aten._grouped_mm.default", (LEFT, torch.ones(2, 5, 6).transpose(1, 2), torch.ones(2, dtype=torch.int32)), "nt"),
        ("aten.add.Tensor", (LEFT, LEFT), ""),
    ],
)
def test_a_products_form_says_which_operands_lie_transposed(
    name: str, inputs: tuple[torch.Tensor, ...], form: str
) -> None:
    assert form_of(name, inputs) == form


def test_a_single_row_is_taken_as_it_is() -> None:
    assert form_of("aten.mm.default", (torch.ones(1, 6), torch.ones(6, 1).expand(6, 1))) == "nn"


def test_an_ops_dtype_is_that_of_the_first_floats_it_reads_then_of_packed_numbers_then_of_what_it_writes() -> None:
    ids, half = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bfloat16)
    assert dtype_of([ids, half], [LEFT]) == "bf16"
    assert dtype_of([torch.ones(3, dtype=torch.int8)], [LEFT]) == "int8"
    assert dtype_of([ids], [half]) == "bf16"
    assert dtype_of([ids], [ids]) == ""


def test_a_linear_layer_is_traced_in_its_three_forms_and_autocast_in_its_dtype() -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep",)),
        weights=WeightsPlan(autocast="bf16"),
    )
    workload = TrainingWorkload(sequence_length=16, global_batch_size=1)
    profile = profile_model(read_model_spec(config), extent=extent_of_plans([plan], workload=workload))
    products = [op for op in profile.ops if op.name.startswith(("aten.mm.", "aten.addmm."))]
    assert {op.form for op in products} == {"nn", "nt", "tn"}
    (regimes,) = profile.regimes.values()
    regime = regimes[0]
    head = [profile.ops[index] for index in profile.parts[regime.parts["head"]].ops]
    assert Counter(op.dtype for op in head if op.kind == "matmul") == {"bf16": 1}
    assert any(op.dtype == "fp32" for op in head)


def test_attention_says_whether_it_is_causal() -> None:
    name, inputs = "aten._scaled_dot_product_flash_attention_for_cpu.default", (torch.ones(1, 2, 4, 8),) * 3
    assert form_of(name, inputs, is_causal=True) == ""
    assert form_of(name, inputs) == "whole"
