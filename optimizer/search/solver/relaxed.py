"""The least time of a setting's plans that keep a budget, from below: the dual of choosing for each block, in closed form.

Choosing a form for every block so that bytes fit and the longest of several sums is short is a small linear program once blocks
may be divided. Any weights of the sums and any price of a byte give a lower bound on it, so nothing has to be solved: bounds are
taken at a few weights, each with all prices at which some block would change its mind, and the best of them holds.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimizer.estimate.bounds.lower_bounds import Relaxation

Numbers = NDArray[np.float64]
INFINITE_MS: Final = float("inf")
_STEPS: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.96, 0.99)
"""Weights of two sums that are looked at."""
_SLACK: Final = 1e-9
"""Share by which rounding may make a bound too high."""


def least_high_bytes(found: Relaxation, *, share: float = 1.0) -> Numbers:
    """[chunks]: no plan has a smaller upper end of its peak. share: the most of the state that may leave, where it may."""
    own_bytes = found.last_bytes.min(axis=1) + _least_in_kinds(found)
    held_bytes = np.maximum(own_bytes, found.end_bytes) - share * found.state_bytes + found.fixed_bytes
    least: Numbers = held_bytes * (1 + found.margin) * (1 - _SLACK)
    return least


def with_host_limit(found: Relaxation, *, host_budget_bytes: int) -> Relaxation:
    """The relaxation of plans for which the host has room: with sums in which what blocks have on the host costs time, and the
    room for it gives as much.

    No plan that the host has room for is faster than such a sum, whatever a byte there costs. Looked at are the costs at which a
    block's way to the host spares as much as the cheapest way to run its ops again.
    """
    room_bytes = host_budget_bytes - (found.host_bytes - found.state_host_bytes)
    most_bytes = found.num_of_kind @ found.kind_host_bytes.max(axis=1) if len(found.num_of_kind) else 0.0
    if room_bytes < 0 or most_bytes + found.last_host_bytes.max() + found.state_host_bytes <= room_bytes:
        return found
    longest = int((found.kind_ms[:, :, 0] @ found.num_of_kind + found.last_ms[:, 0] + found.fixed_ms[:, 0]).argmax())
    costs = np.array(_list_host_costs(found, longest)).reshape(-1, 1, 1)
    if not len(costs):
        return found
    by_byte, state_ms = costs[:, 0], found.state_ms[longest] + costs[:, 0, 0] * found.state_host_bytes
    return replace(
        found,
        kind_ms=np.concatenate([found.kind_ms, found.kind_ms[longest] + costs * found.kind_host_bytes]),
        last_ms=np.concatenate([found.last_ms, found.last_ms[longest] + by_byte * found.last_host_bytes]),
        fixed_ms=np.concatenate([found.fixed_ms, found.fixed_ms[longest] - by_byte * room_bytes]),
        state_ms=np.concatenate([found.state_ms, state_ms]),
    )


def _list_host_costs(found: Relaxation, longest: int) -> list[float]:
    """Milliseconds a byte on the host, one for each form that moves bytes there, by the kind of most blocks. longest: the sum
    that is looked at.
    """
    if not len(found.num_of_kind):
        return []
    kind = int(found.num_of_kind.argmax())
    held, on_host = found.kind_bytes[kind], found.kind_host_bytes[kind]
    saved_bytes, spent_ms = held.max() - held, found.kind_ms[longest, kind] - found.kind_ms[longest, kind].min()
    rebuilt = (on_host == 0) & (saved_bytes > 0) & (spent_ms > 0)
    moved = (on_host > 0) & (saved_bytes > 0)
    if not rebuilt.any():
        return []
    again_ms = (spent_ms[rebuilt] / saved_bytes[rebuilt]).min()
    return sorted({float(cost) for cost in again_ms * saved_bytes[moved] / on_host[moved]})


def bound_with_between(found: Relaxation, *, budget_bytes: int, enough_ms: float = INFINITE_MS) -> tuple[Numbers, Numbers]:
    """``bound_relaxed`` for each count of chunks, and for each with all up to the next."""
    both = replace(
        found,
        last_bytes=np.concatenate([found.last_bytes, _with_next(found.last_bytes)]),
        end_bytes=np.concatenate([found.end_bytes, _with_next(found.end_bytes)]),
        fixed_ms=np.concatenate([found.fixed_ms, found.fixed_ms], axis=1),
    )
    own, between = np.split(bound_relaxed(both, budget_bytes=budget_bytes, enough_ms=enough_ms), 2)
    return own, between


def bound_relaxed(found: Relaxation, *, budget_bytes: int, enough_ms: float = INFINITE_MS) -> Numbers:
    """[chunks]: milliseconds; infinite where nothing fits. enough_ms: bounds that are as high need not be the best."""
    room_bytes = budget_bytes / (1 + found.margin) - found.fixed_bytes
    fits = _fits(found, room_bytes)
    if not fits.any():
        return np.full(len(fits), INFINITE_MS)
    # Two for each count: a sum that counts bytes on the host and the one it is made of are alike where a disk takes them.
    num_best = 2 if found.kind_host_bytes.any() else 1
    found = _with_useful_forms(found)
    sums = _undominated(found)
    single = _bounds(found, sums, np.eye(len(sums)), room_bytes)
    bounds = single.max(axis=0)
    low = np.flatnonzero(fits & (bounds * (1 - _SLACK) < enough_ms))
    if len(sums) > 1 and len(low):
        best = np.unique(np.argsort(-single[:, low], axis=0, kind="stable")[:num_best])
        paired = _bounds(at_counts(found, low), sums, _pairs(len(sums), tuple(best.tolist())), room_bytes)
        bounds[low] = np.maximum(bounds[low], paired.max(axis=0))
    return np.where(fits, bounds * (1 - _SLACK), INFINITE_MS)


def at_counts(found: Relaxation, which: NDArray[np.int64] | slice) -> Relaxation:
    """With some of the counts of chunks alone."""
    return replace(
        found, last_bytes=found.last_bytes[which], end_bytes=found.end_bytes[which], fixed_ms=found.fixed_ms[:, which]
    )


@cache
def _pairs(num_sums: int, best: tuple[int, ...]) -> Numbers:
    """[.., sum]: weights of each of the best sums with each other one."""
    vertices = np.eye(num_sums)
    return np.array(
        [
            step * vertices[one] + (1 - step) * other
            for one in best
            for other in np.delete(vertices, one, axis=0)
            for step in _STEPS
        ]
    )


def count_forms(found: Relaxation, *, budget_bytes: int) -> tuple[int, int] | None:
    """For three forms and one count of chunks, how many blocks take the first and the last where the longest sum is shortest and
    bytes fit, blocks of all kinds as one. No bound; None where nothing fits."""
    num_blocks = int(found.num_of_kind.sum()) + 1
    first, last = np.meshgrid(np.arange(num_blocks + 1), np.arange(num_blocks + 1), indexing="ij")
    counts = np.stack([first, num_blocks - first - last, last])
    mean_bytes = (found.num_of_kind @ found.kind_bytes + found.last_bytes[0]) / num_blocks
    mean_ms = (np.tensordot(found.kind_ms, found.num_of_kind, axes=(1, 0)) + found.last_ms) / num_blocks
    room_bytes = budget_bytes / (1 + found.margin) - found.fixed_bytes
    step_ms = (np.tensordot(mean_ms, counts, axes=1) + found.fixed_ms[:, :1, None]).max(axis=0)
    step_ms[(counts[1] < 0) | (np.tensordot(mean_bytes, counts, axes=1) > room_bytes)] = INFINITE_MS
    best = np.unravel_index(step_ms.argmin(), step_ms.shape)
    return (int(best[0]), int(best[1])) if np.isfinite(step_ms[best]) else None


def _with_next(rows: Numbers) -> Numbers:
    least: Numbers = np.minimum(rows, np.concatenate([rows[1:], rows[-1:]]))
    return least


def _fits(found: Relaxation, room_bytes: float) -> NDArray[np.bool_]:
    """[chunks]: whether the least that blocks could hold has room."""
    most_bytes = np.maximum(_least_in_kinds(found) + found.last_bytes.min(axis=1), found.end_bytes)
    fits: NDArray[np.bool_] = most_bytes - found.state_bytes <= room_bytes * (1 + _SLACK)
    return fits


def _least_in_kinds(found: Relaxation) -> float:
    """The least that all blocks but the last hold."""
    return float(found.num_of_kind @ found.kind_bytes.min(axis=1)) if len(found.num_of_kind) else 0.0


def _with_useful_forms(found: Relaxation) -> Relaxation:
    """Without the forms for which another one takes no more bytes and no more time, in any block and any sum."""
    num_forms = found.last_bytes.shape[1]
    costs = np.concatenate(
        [
            found.kind_bytes.reshape(-1, num_forms),
            found.last_bytes,
            found.kind_ms.reshape(-1, num_forms),
            found.last_ms,
        ]
    )
    is_at_most: NDArray[np.bool_] = np.asarray((costs[:, :, None] <= costs[:, None, :]).all(axis=0))
    is_useless = (is_at_most & (~is_at_most.T | np.tri(num_forms, k=-1, dtype=bool).T)).any(axis=0)
    if not is_useless.any():
        return found
    return with_forms(found, np.flatnonzero(~is_useless))


def with_forms(found: Relaxation, which: Sequence[int] | NDArray[np.int64]) -> Relaxation:
    """With some of the forms alone."""
    return replace(
        found,
        kind_bytes=found.kind_bytes[:, which],
        kind_ms=found.kind_ms[:, :, which],
        last_bytes=found.last_bytes[:, which],
        last_ms=found.last_ms[:, which],
        kind_host_bytes=found.kind_host_bytes[:, which],
        last_host_bytes=found.last_host_bytes[which],
    )


def _undominated(found: Relaxation) -> list[int]:
    """Sums that no other is at least as long as, whatever is chosen."""
    rows = np.concatenate(
        [
            found.kind_ms.reshape(len(found.kind_ms), -1),
            found.last_ms,
            found.fixed_ms,
            found.fixed_ms + found.state_ms[:, None],
        ],
        axis=1,
    )
    is_above: NDArray[np.bool_] = np.asarray((rows[:, None] >= rows[None]).all(axis=2))
    kept: list[int] = []
    for index in range(len(rows)):
        others = [*kept, *range(index + 1, len(rows))]
        if not is_above[others, index].any():
            kept.append(index)
    return kept


def _bounds(found: Relaxation, sums: list[int], weights: Numbers, room_bytes: float) -> Numbers:
    """[weights, chunks]: the best over prices of a byte. weights: [.., sum], each row sums to 1."""
    kind_ms = np.tensordot(weights, found.kind_ms[sums], axes=1)
    last_ms = weights @ found.last_ms[sums]
    fixed_ms = weights @ found.fixed_ms[sums]
    state_ms = weights @ found.state_ms[sums]
    prices = _list_prices(found, kind_ms, last_ms, state_ms)
    # Forms come first, so that the least of them is found for many prices at once.
    each = prices[None, :, :, None]
    kind_forms_ms = np.ascontiguousarray(kind_ms.transpose(2, 0, 1))[:, :, None]
    in_kinds = (kind_forms_ms + each * found.kind_bytes.T[:, None, None]).min(axis=0) @ found.num_of_kind
    in_last = (last_ms.T[:, :, None, None] + each * found.last_bytes.T[:, None, None]).min(axis=0)
    leaving = np.minimum(0.0, state_ms[:, None] - prices * found.state_bytes)
    best: Numbers = (in_last + (in_kinds + leaving - prices * room_bytes)[:, :, None]).max(axis=1) + fixed_ms
    return best


def _list_prices(found: Relaxation, kind_ms: Numbers, last_ms: Numbers, state_ms: Numbers) -> Numbers:
    """[weights, price]: milliseconds a byte at which two forms of a kind cost the same, or the state may leave or stay."""
    forms_ms, forms_bytes = kind_ms, found.kind_bytes
    if not len(found.num_of_kind):
        forms_ms, forms_bytes = last_ms[:, None], found.last_bytes[:1]
    one, other = np.triu_indices(forms_bytes.shape[1], k=1)
    saved_bytes = forms_bytes[:, one] - forms_bytes[:, other]
    spent_ms = forms_ms[:, :, other] - forms_ms[:, :, one]
    with np.errstate(divide="ignore", invalid="ignore"):
        prices = (spent_ms / saved_bytes).reshape(len(spent_ms), -1)
        moving = (state_ms / found.state_bytes)[:, None] if found.state_bytes else np.zeros((len(state_ms), 1))
    prices = np.concatenate([np.zeros((len(prices), 1)), moving, prices], axis=1)
    return np.where(np.isfinite(prices) & (prices > 0), prices, 0.0)
