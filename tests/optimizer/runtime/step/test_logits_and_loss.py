"""Loss in chunks: the gradients of plain training within rounding, in anyone's training loop, and never all logits at once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimizer.base.errors import InvalidPlan
from optimizer.models.anatomy import find_anatomy
from optimizer.models.build import build_model
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.logits_and_loss import chunk_ranges, chunked_cross_entropy, compute_loss
from tests.optimizer.runtime.tiny import make_spec

NUM_TOKENS, WIDTH, VOCABULARY = 37, 24, 101
RELATIVE_BOUND = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Share of the largest entry, against fp64 on the same inputs; plain training in the same dtype is as far away."""


def make_head(
    dtype: torch.dtype = torch.float64, *, bias: bool = False
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return numbers.to(dtype).requires_grad_()

    labels = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    return draw(NUM_TOKENS, WIDTH), draw(VOCABULARY, WIDTH, scale=0.3), draw(VOCABULARY) if bias else None, labels


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, *, soft_cap: Any = None
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return F.cross_entropy(logits, labels)


def gradients(loss: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, [tensor for tensor in inputs if tensor is not None])


def assert_close(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bound: float
) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        distance = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert distance <= bound


@pytest.mark.parametrize("dtype", list(RELATIVE_BOUND), ids=str)
@pytest.mark.parametrize("num_chunks", [2, 5, 37, 64])
@pytest.mark.parametrize(("bias", "soft_cap"), [(False, None), (True, None), (False, 5.0), (True, 5.0)])
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    dtype: torch.dtype, num_chunks: int, bias: bool, soft_cap: float | None
) -> None:
    hidden, weight, offsets, labels = make_head(dtype, bias=bias)
    exact: list[Any] = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, weight, offsets)]
    expected_loss = plain(exact[0], exact[1], exact[2], labels, soft_cap=soft_cap)
    # Stands for a loop that scales its loss.
    expected = gradients(expected_loss * 1024, *exact)
    loss = chunked_cross_entropy(hidden, weight, labels, bias=offsets, num_chunks=num_chunks, soft_cap=soft_cap)
    found = gradients(loss * 1024, hidden, weight, offsets)
    assert [g.dtype for g in found] == [dtype] * len(found)
    assert_close(found, expected, RELATIVE_BOUND[dtype])
    assert_close([loss.detach()], [expected_loss.detach()], RELATIVE_BOUND[dtype])


def test_in_autocast_products_are_bf16_and_sums_and_gradients_fp32() -> None:
    hidden, weight, _, labels = make_head(torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = gradients(plain(exact[0], exact[1], None, labels, soft_cap=5.0), *exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(chunked_cross_entropy(hidden, weight, labels, num_chunks=4, soft_cap=5.0), hidden, weight)
    assert [g.dtype for g in found] == [torch.float32, torch.float32]
    assert_close(found, expected, 1.2e-2)


def test_tokens_labelled_to_be_ignored_count_for_nothing() -> None:
    hidden, weight, _, labels = make_head()
    labels[3:9] = -100
    expected = plain(hidden, weight, None, labels)
    found = chunked_cross_entropy(hidden, weight, labels, num_chunks=6)
    assert_close([found.detach()], [expected.detach()], 1e-14)
    assert_close(gradients(found, hidden, weight), gradients(expected, hidden, weight), 1e-14)
    hidden_gradient = gradients(chunked_cross_entropy(hidden, weight, labels, num_chunks=6), hidden)[0]
    assert not hidden_gradient[3:9].any()


def test_a_shape_and_a_number_of_chunks_give_the_same_bits_every_time() -> None:
    hidden, weight, _, labels = make_head(torch.float32)
    runs = [gradients(chunked_cross_entropy(hidden, weight, labels, num_chunks=5), hidden, weight) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_accumulation_over_micro_batches_adds_up_to_the_gradient_of_the_whole() -> None:
    hidden, weight, _, labels = make_head()
    halves = [(hidden.detach()[:18], labels[:18]), (hidden.detach()[18:36], labels[18:36])]
    for tokens, wanted in halves:
        (chunked_cross_entropy(tokens, weight, wanted, num_chunks=4) / 2).backward()
    expected = gradients(plain(hidden[:36], weight, None, labels[:36]), weight)[0]
    assert_close([weight.grad], [expected], 1e-14)


def test_a_frozen_head_gets_no_gradient_and_no_room_for_one() -> None:
    hidden, weight, _, labels = make_head(torch.float32)
    weight.requires_grad_(False)
    meter = Meter(device=torch.device("cpu"))
    with meter:
        chunked_cross_entropy(hidden, weight, labels, num_chunks=NUM_TOKENS).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert meter.peak().device_bytes < weight.nbytes


def test_at_most_two_chunks_of_logits_exist_in_training_and_in_evaluation() -> None:
    hidden, weight, labels = torch.randn(64, 2, requires_grad=True), torch.randn(5000, 2), torch.randint(5000, (64,))
    chunk_bytes = 8 * 5000 * 4
    for grad_mode in (torch.enable_grad, torch.no_grad):
        meter = Meter(device=torch.device("cpu"))
        with grad_mode(), meter:
            chunked_cross_entropy(hidden, weight, labels, num_chunks=8)
        assert chunk_bytes <= meter.peak().device_bytes <= 2 * chunk_bytes


def test_without_gradients_the_loss_is_the_same_and_has_no_graph() -> None:
    hidden, weight, _, labels = make_head(torch.float32)
    with_graph = chunked_cross_entropy(hidden, weight, labels, num_chunks=3)
    with torch.no_grad():
        without = chunked_cross_entropy(hidden, weight, labels, num_chunks=3)
    assert not without.requires_grad
    assert torch.equal(without, with_graph.detach())


def test_gradients_can_be_taken_once_and_the_second_time_says_so() -> None:
    hidden, weight, _, labels = make_head(torch.float32)
    loss = chunked_cross_entropy(hidden, weight, labels, num_chunks=3)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="taken already"):
        loss.backward()


def test_the_parameter_keeps_the_sum_itself_as_its_gradient() -> None:
    hidden, weight, _, labels = make_head(torch.float32)
    meter = Meter(device=torch.device("cpu"))
    with meter:
        loss = chunked_cross_entropy(hidden.detach(), weight, labels, num_chunks=3)
        before_bytes = meter.device_bytes
        meter.reset_peak()
        loss.backward()
    assert meter.peak().device_bytes - before_bytes < weight.nbytes
    assert weight.grad.untyped_storage().nbytes() == weight.nbytes


def test_chunks_are_equal_runs_with_a_shorter_last_one() -> None:
    assert list(chunk_ranges(10, 4)) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert list(chunk_ranges(2, 4)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_each_architecture_trains_its_own_head_tied_or_capped(name: str) -> None:
    model = build_model(make_spec(name), dtype=torch.float64, seed=1).eval()
    anatomy = find_anatomy(model)
    ids = torch.randint(512, (2, 16))
    found = []
    for num_chunks in (1, 5):
        hidden = anatomy.backbone(input_ids=ids, use_cache=False).last_hidden_state
        compute_loss(anatomy, hidden, ids, plan=LogitsAndLossPlan(num_chunks=num_chunks)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    # Norms are computed in fp32 by transformers, whatever the dtype; their gradients cancel to it.
    assert_close(found[1], found[0], 1e-5)


def test_a_head_that_is_more_than_a_projection_is_refused_by_name() -> None:
    class Adapted(nn.Linear):
        pass

    model = build_model(make_spec(), seed=1)
    model.lm_head = Adapted(64, 512, bias=False)
    with pytest.raises(InvalidPlan, match=r"the model's head is a Adapted, and only a plain projection"):
        compute_loss(
            find_anatomy(model),
            torch.zeros(1, 8, 64),
            torch.zeros(1, 8, dtype=torch.long),
            plan=LogitsAndLossPlan(num_chunks=2),
        )
