"""Carries out the logits-and-loss row of a plan: from the last hidden state to the loss.

One chunk is torch's own cross-entropy over all logits at once. More of them run in ``_ChunkedLoss``: what backward needs of a
chunk is the product of its probabilities with the head and with the hidden states, so both products are made as soon as the
probabilities are there, in the buffer that held the logits, and backward only multiplies their sums by the incoming gradient.
The products are those of plain training, none is made twice (Liger Kernel's fused linear cross-entropy, arXiv 2410.10989).

Against plain training the gradients differ by rounding and by the order of sums over tokens: in fp32 by a few units in the
last place times the square root of the number of chunks. With bf16 or fp16 weights each chunk's share of the head's gradient
is rounded once and the shares are summed in fp32, as plain training's one product sums inside. A number of chunks and a shape
give the same bits every time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from optimizer.base.errors import InvalidPlan
from optimizer.data.batches import IGNORED_LABEL
from optimizer.models.anatomy import Anatomy
from optimizer.plan.logits_and_loss import WIDE_COPY_ELEMENTS, LogitsAndLossPlan
from optimizer.runtime.layers.matmul_dispatch import making_products

_HALF_SHRINK = 2.0**-5
"""A chunk's share of the head's gradient is made this much smaller in fp16, whose largest number is 65,504."""


def compute_loss(
    anatomy: Anatomy, result: torch.Tensor, labels: torch.Tensor, *, plan: LogitsAndLossPlan
) -> torch.Tensor:
    """The loss, a scalar in the graph: the anatomy's own, or mean cross-entropy over all tokens that count; in fp32 where it
    is made in chunks.

    result: what ``anatomy.run`` returned, [batch, sequence, hidden_size] or logits; labels: [batch, sequence], -100 where a
    token does not count. Raises InvalidPlan where chunks are asked of a head that is no plain projection.
    """
    if plan.num_chunks == 1:
        logits = anatomy.compute_logits(result)
        if anatomy.loss is not None:
            return anatomy.loss(logits, labels)
        # No shift and no upcast here: both would copy the largest tensor of the step.
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    head = anatomy.head
    if not anatomy.is_chunkable or head is None:
        raise InvalidPlan(
            f"plan.logits_and_loss.num_chunks is {plan.num_chunks}; the model's head is a {type(head).__name__}, and only "
            "a plain projection (Linear) is cut into chunks; use 1, or leave the head out of the adapter's targets",
            field="plan.logits_and_loss.num_chunks",
            value=plan.num_chunks,
            allowed=1,
        )
    return chunked_cross_entropy(
        result.flatten(0, 1),
        head.weight,  # type: ignore[arg-type]
        labels.flatten(),
        bias=head.bias,  # type: ignore[arg-type]
        num_chunks=plan.num_chunks,
        soft_cap=anatomy.soft_cap,
    )


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_chunks: int,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """``cross_entropy(hidden @ weight.T + bias, labels)`` with two chunk-sized tensors of logits at most.

    hidden: [tokens, hidden_size]; weight: [vocabulary, hidden_size]; labels: [tokens]. Gradients are made for those of
    hidden, weight and bias that require them, in the forward pass; they can be taken once.
    """
    head = _Head(weight=weight, bias=bias, soft_cap=soft_cap, num_chunks=num_chunks)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, head)  # type: ignore[no-untyped-call]
        return loss
    with torch.no_grad():
        sums = _sum_chunks(head, hidden, labels, wants=(False, False, False))
        return sums.loss / sums.num_counted


@dataclass(frozen=True, kw_only=True)
class _Head:
    weight: torch.Tensor
    bias: torch.Tensor | None
    soft_cap: float | None
    num_chunks: int


@dataclass(kw_only=True)
class _Sums:
    """Over all tokens, not yet divided by their number."""

    loss: torch.Tensor
    num_counted: torch.Tensor
    hidden: torch.Tensor | None
    """Gradients from here on; in the dtype of the tensor, the next two in fp32 or wider."""
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class _ChunkedLoss(torch.autograd.Function):
    """Holds the sums as attributes, not as saved tensors, so that backward can give them away without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: _Head,
    ) -> torch.Tensor:
        ctx.dtype = weight.dtype
        ctx.sums = sums = _sum_chunks(head, hidden, labels, wants=ctx.needs_input_grad[:3])
        return sums.loss / sums.num_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums: _Sums | None
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "the gradients of a loss made in chunks were taken already; "
                "a second backward needs plan.logits_and_loss.num_chunks 1"
            )
        # No number is read back here: that would make CUDA wait.
        factor = gradient / sums.num_counted
        for total in (sums.hidden, sums.weight, sums.bias):
            if total is not None:
                total.mul_(factor)
        weight = None if sums.weight is None else sums.weight.to(ctx.dtype)
        bias = None if sums.bias is None else sums.bias.to(ctx.dtype)
        return sums.hidden, weight, bias, None, None


def _sum_chunks(head: _Head, hidden: torch.Tensor, labels: torch.Tensor, *, wants: tuple[bool, bool, bool]) -> _Sums:
    """wants: whether the gradients of hidden, weight and bias are to be made."""
    compute = _compute_dtype(hidden)
    wide = torch.promote_types(compute, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        sums = _Sums(
            loss=hidden.new_zeros((), dtype=wide),
            num_counted=hidden.new_zeros((), dtype=torch.int64),
            hidden=torch.empty_like(hidden) if wants[0] else None,
            weight=head.weight.new_zeros(head.weight.shape, dtype=wide) if wants[1] else None,
            bias=head.weight.new_zeros(head.weight.shape[0], dtype=wide) if wants[2] else None,
        )
        worker = _Worker(head, hidden, sums, compute=compute)
        for start, end in chunk_ranges(hidden.shape[0], head.num_chunks):
            with making_products(end - start, hidden.shape[1], head.weight.shape[0], of=hidden):
                worker.add(hidden[start:end], labels[start:end], start=start)
    return sums


def chunk_ranges(num_tokens: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """Runs of equal length, the last one shorter; fewer than asked for where that covers all tokens."""
    length = math.ceil(num_tokens / num_chunks)
    return ((start, min(start + length, num_tokens)) for start in range(0, num_tokens, length))


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _Worker:
    """Owns the buffers that all chunks of one micro-batch share.

    ``_logits`` is in the dtype of the product. ``_probabilities`` is the same tensor, but where autocast asks for fp32 or a
    soft cap must be remembered; whichever of the two is free in the end takes shares of the head's gradient.
    """

    def __init__(self, head: _Head, hidden: torch.Tensor, sums: _Sums, *, compute: torch.dtype) -> None:
        self._sums = sums
        self._cap = head.soft_cap
        self._is_autocast = compute != hidden.dtype
        self._weight = head.weight.to(compute)
        self._bias = None if head.bias is None else head.bias.to(compute)
        length = math.ceil(hidden.shape[0] / head.num_chunks)
        shape = (length, head.weight.shape[0])
        self._logits = hidden.new_empty(shape, dtype=compute)
        self._probabilities = self._logits
        if self._is_autocast:
            self._probabilities = hidden.new_empty(shape, dtype=torch.promote_types(compute, torch.float32))
        elif self._cap is not None:
            self._probabilities = torch.empty_like(self._logits)
        self._one = hidden.new_ones((), dtype=compute) if self._cap is not None else None
        self._spare = self._find_spare()

    def _find_spare(self) -> torch.Tensor | None:
        """Room for a share of the head's gradient, flat; none where the product can add to the sum by itself."""
        if self._sums.weight is None or self._sums.weight.dtype == self._weight.dtype:
            return None
        if self._is_autocast:
            spare = self._probabilities.view(self._weight.dtype).flatten()
        elif self._cap is not None:
            spare = self._logits.flatten()
        else:
            spare = self._logits.new_empty(0)
        num_elements = min(max(self._logits.numel(), self._weight.shape[1]), self._weight.numel())
        return spare if spare.numel() >= self._weight.shape[1] else self._logits.new_empty(num_elements)

    def add(self, hidden: torch.Tensor, labels: torch.Tensor, *, start: int) -> None:
        """One chunk's loss and gradients into the sums."""
        length = hidden.shape[0]
        logits, probabilities = self._logits[:length], self._probabilities[:length]
        hidden = hidden.to(logits.dtype)
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, hidden, self._weight.t(), out=logits)
        if self._cap is not None:
            torch.mul(logits.div_(self._cap).tanh_(), self._cap, out=probabilities)
        elif self._is_autocast:
            probabilities.copy_(logits)
        self._add_loss(probabilities, labels.unsqueeze(1))
        sums = self._sums
        if sums.hidden is None and sums.weight is None and sums.bias is None:
            return
        if self._one is not None:
            # d tanh(z) is 1 - tanh(z)^2; the cap itself cancels.
            probabilities.mul_(torch.addcmul(self._one, logits, logits, value=-1, out=logits))
        gradient = logits.copy_(probabilities) if self._is_autocast else probabilities
        if sums.hidden is not None:
            target = sums.hidden[start : start + length]
            if target.dtype == gradient.dtype:
                torch.mm(gradient, self._weight, out=target)
            else:
                target.copy_(torch.mm(gradient, self._weight))
        if sums.weight is not None:
            self._add_weight_gradient(sums.weight, gradient, hidden)
        if sums.bias is not None:
            sums.bias.add_(gradient.sum(0, dtype=sums.bias.dtype))

    def _add_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Turns the logits into their gradient in place: probabilities less one at the label, zero where none counts."""
        wide = self._sums.loss.dtype
        counts = labels != IGNORED_LABEL
        labels = labels.clamp(min=0)
        target = logits.gather(1, labels).to(wide)
        highest = logits.amax(1, keepdim=True)
        total = logits.sub_(highest).exp_().sum(1, keepdim=True, dtype=wide)
        losses = total.log().add_(highest).sub_(target)
        self._sums.loss.add_(losses.masked_fill_(~counts, 0).sum())
        self._sums.num_counted.add_(counts.sum())
        sums = self._sums
        if sums.hidden is None and sums.weight is None and sums.bias is None:
            return
        scale = total.reciprocal_().mul_(counts)
        # Of mixed dtypes the CPU would make wide copies; one over the sum may be too small a number for fp16.
        logits.mul_(scale.to(logits.dtype) if logits.dtype == torch.bfloat16 else scale)
        logits.scatter_(1, labels, logits.gather(1, labels).sub_(counts.to(logits.dtype)))

    def _add_weight_gradient(self, total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        if self._spare is None:
            total.addmm_(gradient.t(), hidden)
            return
        shrink = _HALF_SHRINK if gradient.dtype == torch.float16 else 1.0
        width = hidden.shape[1]
        num_rows = self._spare.numel() // width
        for start in range(0, total.shape[0], num_rows):
            rows = total[start : start + num_rows]
            share = self._spare[: rows.numel()].view(rows.shape)
            columns = gradient[:, start : start + num_rows]
            torch.addmm(share, columns.t(), hidden, beta=0, alpha=shrink, out=share)
            _add_wide_(rows, share, alpha=1 / shrink)


def _add_wide_(total: torch.Tensor, share: torch.Tensor, *, alpha: float) -> None:
    """Add what is narrower. Of mixed dtypes the CPU would make a wide copy of the whole; a small one stays in its cache."""
    height = max(1, WIDE_COPY_ELEMENTS // total.shape[1]) if total.device.type == "cpu" else total.shape[0]
    for rows, part in zip(torch.split(total, height), torch.split(share, height), strict=True):
        rows.add_(part if total.is_cuda else part.to(total.dtype), alpha=alpha)
