"""Bytes that grouped products over experts read: the weights of the experts that some token chose, not of all. Torch-free.

A token takes ``k`` of ``E`` experts. Of ``T`` tokens that choose alike and apart from each other, ``E (1 - (1 - k/E)^T)`` experts
are chosen at least once. A decode of few sequences so reads few of them; a prompt reads nearly all. A trace knows neither ``k``
nor ``E``, but both follow from its sizes: an op over ``T`` tokens that brings rows of ``K`` numbers to ``N`` does ``2 T k K N``
FLOPs, reads ``T k K`` numbers beside the weights, writes ``T k N``, and holds ``E K N`` weights with ``E`` ends of groups.

*Not modelled*: routers that favour some experts, which reads fewer; kernels that read all the same; layers of one model that
differ in ``k`` or ``E``. Memory is not touched by this: all experts are there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.formats.op_costs import GROUPED_PRODUCT, base_name
from optimizer.profile.ops import Op
from optimizer.profile.sizes import Shape, monomials

_END_BYTES = 4
"""Bytes of one group's end, an int32."""


class Experts(NamedTuple):
    """The experts of a model."""

    num_experts: int
    num_chosen: int
    """Experts chosen by each token."""

    def expected_share(self, num_tokens: int) -> float:
        """Share of the experts that any of so many tokens chooses, on average."""
        return 1.0 - (1.0 - self.num_chosen / self.num_experts) ** num_tokens


def find_experts(ops: Sequence[Op], *, element_bytes: int) -> Experts | None:
    """Find the experts from the first grouped product in numbers of that many bytes whose rows grow with the shape;
    None where there is none.

    A profile lists the ops of every dtype it was traced in: with another width the sizes do not come out even.
    """
    return next(filter(None, (_read_experts(op, element_bytes) for op in ops)), None)


def _read_experts(op: Op, element_bytes: int) -> Experts | None:
    if base_name(op.name) != GROUPED_PRODUCT:
        return None
    weights_bytes, *rows = op.read_bytes
    growing = [index for index, terms in enumerate(op.flops) if terms]
    if not weights_bytes or len(growing) != 1 or growing[0] == 0:
        return None
    flops, rows_bytes, written_bytes = op.flops[growing[0]], rows[growing[0] - 1], op.written_bytes[growing[0]]
    if not rows_bytes or not written_bytes:
        return None
    num_chosen = 2 * rows_bytes * written_bytes // (element_bytes**2 * flops)
    if num_chosen < 1:
        return None
    matrix_bytes = flops // (2 * num_chosen) * element_bytes
    num_experts, rest = divmod(weights_bytes, matrix_bytes + _END_BYTES)
    return None if rest else Experts(num_experts=num_experts, num_chosen=num_chosen)


def unread_bytes(ops: Sequence[Op], shape: Shape, *, element_bytes: int) -> NDArray[np.float64]:
    """Bytes by which each op is expected to read less than all experts' weights."""
    unread = np.zeros(len(ops))
    experts = find_experts(ops, element_bytes=element_bytes)
    if experts is None:
        return unread
    values = monomials(shape)
    for index, op in enumerate(ops):
        growing = [value for terms, value in zip(op.flops, values, strict=True) if terms]
        if base_name(op.name) != GROUPED_PRODUCT or len(growing) != 1:
            continue
        matrix_bytes = max(op.flops) // (2 * experts.num_chosen) * element_bytes
        weights_bytes = experts.num_experts * (matrix_bytes + _END_BYTES)
        # A gradient of the weights reads none of them.
        if op.read_bytes[0] >= weights_bytes:
            unread[index] = (1.0 - experts.expected_share(growing[0])) * weights_bytes
    return unread
