"""2:4 sparse frozen weights: pruned as said, multiplied as pruned, refused where no kernel runs."""

import pytest
import torch
from torch import nn

from optimizer.base.errors import InvalidPlan
from optimizer.runtime.semi_structured import make_reference, make_semi_structured, prune_2_to_4


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make_linear(num_inputs=64, num_outputs=128, *, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(num_inputs, num_outputs, bias=bias, dtype=dtype)


def test_the_two_largest_of_four_neighbours_stay():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, -1.0, 0.0], [2.0, 2.0, 2.0, 2.0, -5.0, 4.0, 4.5, 1.0]])
    expected = torch.tensor([[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, -1.0, 0.0], [2.0, 2.0, 0.0, 0.0, -5.0, 0.0, 4.5, 0.0]])
    assert torch.equal(prune_2_to_4(weight), expected)


def test_pruning_twice_is_pruning_once():
    pruned = prune_2_to_4(make_linear().weight.detach())
    assert torch.equal(prune_2_to_4(pruned), pruned)
    assert (pruned.view(-1, 4) != 0).sum(1).max() == 2


@pytest.mark.parametrize("bias", [True, False])
def test_the_reference_computes_the_pruned_dense_product_and_its_gradient(bias):
    linear = make_linear(bias=bias)
    reference = make_reference(linear)
    dense = make_linear(bias=bias)
    dense.weight.data = prune_2_to_4(linear.weight.detach())
    hidden = torch.randn(2, 5, 64)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(given) for layer, given in zip((reference, dense), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_a_device_without_kernels_is_refused():
    with pytest.raises(
        InvalidPlan, match=r"asked for with the device cpu; allowed: CUDA cards of compute capability 8\.0"
    ):
        make_semi_structured(make_linear(dtype=torch.bfloat16), device=torch.device("cpu"))


def test_inputs_that_are_no_multiple_of_four_are_refused():
    with pytest.raises(
        InvalidPlan, match=r"a matrix of shape \[128, 66\]; allowed: matrices whose inputs are a multiple of 4"
    ):
        make_reference(make_linear(66))


@pytest.mark.gpu
def test_the_packed_product_is_the_pruned_dense_one():
    device = torch.device("cuda:0")
    linear = make_linear(256, 256, dtype=torch.bfloat16)
    packed, reference = make_semi_structured(linear, device=device), make_reference(linear).to(device)
    inputs = [torch.ones(64, 256, dtype=torch.bfloat16, device=device).normal_().requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    outputs = [layer(given) for layer, given in zip((packed, reference), inputs, strict=True)]
    assert torch.allclose(*outputs, rtol=0.02, atol=0.02)
    for output in outputs:
        output.sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=0.02, atol=0.05)
