"""Logits under a soft cap as one node of the graph."""

import torch

from optimizer.models.soft_cap import soften

CAP = 30.0


def test_values_are_those_of_the_chain_with_autograd_and_without() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 50
    chain = torch.tanh(logits / CAP) * CAP
    assert torch.equal(soften(logits, CAP), chain)
    assert torch.equal(soften(logits.requires_grad_(), CAP), chain)


def test_gradients_are_those_of_the_formula() -> None:
    logits = (torch.randn(3, 7, generator=torch.Generator().manual_seed(1)) * 50).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: soften(given, CAP), logits)


def test_in_16_bits_the_gradient_is_as_exact_as_the_chains() -> None:
    exact = (torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * 50).to(torch.bfloat16)
    errors = []
    reference = exact.double().requires_grad_()
    (torch.tanh(reference / CAP) * CAP).sum().backward()
    for run in (lambda given: torch.tanh(given / CAP) * CAP, lambda given: soften(given, CAP)):
        logits = exact.clone().requires_grad_()
        run(logits).sum().backward()
        errors.append(float((logits.grad.double() - reference.grad).norm()))
    assert errors[1] <= errors[0]
