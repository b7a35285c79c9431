"""torch's ``sac_milp`` policy as a training loop: which blocks to checkpoint, and in each which results to keep.

torch's own code (``torch.distributed._tools.sac_ilp``) needs pulp, and its trade-off curves need pwlf; neither is a dependency
here. The statistics are torch's: ``MemTracker`` for bytes by module, ``SACEstimator`` for what each op of a block makes. The two
integer programs of ``sac_ilp.py`` are stated again below and solved by scipy, with the gap and time limit that torch gives CBC;
the trade-off curve is fitted by least squares over all places of its one break, which is what pwlf searches for. torch's times
of ops need CUDA; here each op is run and timed on the job's device, as its ``operator-level-benchmark`` does on a card.

Blocks are the units (``ac_units``), as in torchtitan. *Not modelled*, by torch either: optimizer state, temporaries, and that
more than the discarded bytes is live while a block is recomputed; so a plan's measured peak is what counts, not its budget.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.common.alternatives import Job
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model

UNIT_GAP, UNIT_LIMIT_S = 0.05, 180.0
"""Gap and seconds at which the program over modules stops, as in ``sac_ilp.py``; the next two are of the one inside a module."""
OP_GAP, OP_LIMIT_S = 0.05, 10.0
_NUM_BREAKS = 400
_NUM_TIMED = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One block, as torch's estimators see it."""

    name: str
    saved_bytes: int
    """Bytes that autograd saves in it (``act_fw_per_module``)."""
    made_bytes: int
    """Bytes that its ops make (``sac_memory``)."""
    forward_ms: float
    lines: tuple[tuple[float, float], ...]
    """Slope and intercept: share of the time that discarding a share of the bytes costs, at least."""
    ops: Any
    """torch's ``SACStats``."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One module's backward."""

    live_bytes: int
    """Activations, their gradients, all weights, gradients so far."""
    units_before: tuple[int, ...]
    """Blocks that were through their forward before this module was."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    units: tuple[Unit, ...]
    moments: tuple[Moment, ...]

    @property
    def plain_bytes(self) -> int:
        """torch's idea of the peak when nothing is discarded."""
        return max(moment.live_bytes for moment in self.moments)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The answers of ``sac_milp`` and of the program inside each block."""

    saves: tuple[tuple[bool, ...] | None, ...]
    """Flags of each block, one an op, that say if its result is kept; None for a block that is not checkpointed."""
    names: tuple[tuple[str, ...], ...]
    """Names of the ops."""
    discarded: tuple[float, ...]
    """Share of each block's bytes."""


def collect_statistics(job: Job) -> Statistics:
    """Collect statistics from steps on tensors without data; real ops are run only to be timed."""
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode(allow_non_fake_inputs=True), _without_packing():
        model = _on_device(build_model(job.spec), job.device)
        names = {block: name for name, block in model.named_modules()}
        blocks = [names[block] for block in find_blocks(model)]
        shape = (job.workload.global_batch_size, job.workload.sequence_length)
        ids = torch.zeros(shape, dtype=torch.int64, device=job.device)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            _run(model, ids)
        model.zero_grad()
        estimator: Any = SACEstimator()
        estimator._estimate_runtime = OpClock(job.device).estimate
        with estimator:
            _run(model, ids)
    return _read(blocks, tracker, estimator, job.device)


def solve_units(statistics: Statistics, *, budget_bytes: int) -> tuple[float, ...] | None:
    """``sac_milp`` for one device: by block the share of its bytes to discard, 0 for none; None where it finds no way.

    Variables of each block: y, whether it is checkpointed; r, the share discarded; t, milliseconds of recomputing. torch's
    d, a, m and rcp follow from these and are put in their places. In GiB, as there.
    """
    units, count, scale = statistics.units, len(statistics.units), float(2**30)
    big_ms = max(100.0, 2 * max((unit.forward_ms for unit in units), default=1.0))
    rows: list[Floats] = []
    highs: list[float] = []

    def at_most(high: float, **terms: dict[int, float]) -> None:
        row = np.zeros(3 * count)
        for name, coefficients in terms.items():
            for index, value in coefficients.items():
                row["yrt".index(name) * count + index] += value
        rows.append(row)
        highs.append(high)

    for index, unit in enumerate(units):
        made, extra = unit.made_bytes / scale, (unit.made_bytes - unit.saved_bytes) / scale
        at_most(0.0, r={index: 1.0}, y={index: -1.0})
        at_most(0.0, y={index: extra / made}, r={index: -1.0})
        at_most(0.0, t={index: 1.0}, y={index: -big_ms})
        for slope, intercept in unit.lines:
            ms = unit.forward_ms
            at_most(big_ms - ms * intercept, r={index: ms * slope}, t={index: -1.0}, y={index: big_ms})
    for moment in statistics.moments:
        terms_r = {index: -units[index].made_bytes / scale for index in moment.units_before}
        terms_y = {index: (units[index].made_bytes - units[index].saved_bytes) / scale for index in moment.units_before}
        at_most((budget_bytes - moment.live_bytes) / scale, r=terms_r, y=terms_y)
    found = milp(
        np.concatenate([np.zeros(2 * count), np.ones(count)]),
        constraints=LinearConstraint(np.array(rows), ub=np.array(highs)),
        integrality=np.concatenate([np.ones(count), np.zeros(2 * count)]),
        bounds=Bounds(np.zeros(3 * count), np.concatenate([np.ones(2 * count), np.full(count, np.inf)])),
        options={"mip_rel_gap": UNIT_GAP, "time_limit": UNIT_LIMIT_S},
    )
    if found.x is None:
        return None
    chosen, shares = found.x[:count], found.x[count : 2 * count]
    return tuple(round(float(share), 4) if round(float(y)) else 0.0 for y, share in zip(chosen, shares, strict=True))


def solve_ops(ops: Any, *, kept_share: float) -> tuple[bool, ...]:
    """``get_optimal_checkpointing_policy_per_module``: of each op whether its result is kept."""
    count = len(ops.func_names)
    low, high = np.zeros(count), np.ones(count)
    if ops.force_store_random:
        low[ops.rand_ops] = 1.0
    high[ops.view_like_ops] = 0.0
    rows, bounds = [np.array(ops.memory, dtype=float)], [(-np.inf, float(math.ceil(kept_share * sum(ops.memory))))]
    same = [pair for pair in ops.inplace_ops if pair[0] != pair[1]]
    same += [] if ops.force_store_random else list(zip(ops.rand_ops[:-1], ops.rand_ops[1:], strict=True))
    for first, second in same:
        row = np.zeros(count)
        row[first], row[second] = 1.0, -1.0
        rows.append(row)
        bounds.append((0.0, 0.0))
    for first, second in ops.inplace_ops:
        if first == second:
            low[first] = 1.0
    found = milp(
        -np.array(ops.runtimes, dtype=float),
        constraints=LinearConstraint(np.array(rows), *np.array(bounds).T),
        integrality=np.ones(count),
        bounds=Bounds(low, np.maximum(low, high)),
        options={"mip_rel_gap": OP_GAP, "time_limit": OP_LIMIT_S},
    )
    if found.x is None:
        # torch's function returns no policy then; nothing is kept.
        return (False,) * count
    return tuple(bool(round(value)) for value in found.x)


def find_policy(statistics: Statistics, *, budget_bytes: int) -> Policy | None:
    discarded = solve_units(statistics, budget_bytes=budget_bytes)
    if discarded is None:
        return None
    saves: list[tuple[bool, ...] | None] = []
    known: dict[tuple[str, float], tuple[bool, ...]] = {}
    for unit, share in zip(statistics.units, discarded, strict=True):
        if share == 0.0:
            saves.append(None)
            continue
        key = (repr((unit.ops.memory, unit.ops.runtimes)), share)
        if key not in known:
            known[key] = solve_ops(unit.ops, kept_share=1.0 - share)
        saves.append(known[key])
    names = tuple(tuple(unit.ops.func_names) for unit in statistics.units)
    return Policy(saves=tuple(saves), names=names, discarded=discarded)


def policy_ladder(statistics: Statistics, *, count: int) -> Iterator[tuple[float, Policy]]:
    """Distinct policies for budgets evenly between the least that it finds a way for and what it thinks plain needs; with the
    budget as a share of the latter."""
    plain_bytes = statistics.plain_bytes
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        is_feasible = solve_units(statistics, budget_bytes=int(middle * plain_bytes)) is not None
        low, high = (low, middle) if is_feasible else (middle, high)
    seen: set[Any] = set()
    for step in range(count):
        share = high + (1.0 - high) * step / count
        policy = find_policy(statistics, budget_bytes=int(share * plain_bytes))
        if policy is not None and policy.saves not in seen:
            seen.add(policy.saves)
            yield round(share, 3), policy


def selective_contexts(names: Sequence[str], saves: Sequence[bool]) -> tuple[Any, Any]:
    """Contexts for one run of one block, as ``torch.utils.checkpoint`` asks for them.

    torch refuses kept results that were written to since. Here ops that write in place are kept together with what made the
    result (``solve_ops``), so the recomputation is given what they wrote: attention with a mask on the CPU adds it that way.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        _Follow(names, saves), allow_cache_entry_mutation=True
    )
    return contexts


class _Follow:
    """Op by op, in the forward and again in the recomputation."""

    def __init__(self, names: Sequence[str], saves: Sequence[bool]) -> None:
        from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

        self._skipped = OPS_TO_ALWAYS_SKIP
        self._names, self._saves = names, saves
        self._position = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in self._skipped:
            return CheckpointPolicy.PREFER_RECOMPUTE
        position = self._position[context.is_recompute]
        self._position[context.is_recompute] += 1
        if self._names[position] != op._overloadpacket.__name__:
            raise RuntimeError(f"op {position} is {op}, where the estimator saw {self._names[position]}")
        return CheckpointPolicy.MUST_SAVE if self._saves[position] else CheckpointPolicy.PREFER_RECOMPUTE


class OpClock:
    """Times each op once by running it, and remembers it by what it was given.

    Results are held as long as the clock lives: torch's estimator knows a storage by its hash, and a freed one's is given to
    the next. An op in place was then tied to another op's result, and a policy kept half of a dropout's mask.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, float] = {}
        self._held: list[Any] = []

    def estimate(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The op's result without data, and milliseconds."""
        from torch.utils._runtime_estimation import _IGNORE_OPS, _VIEW_OPS

        kwargs = kwargs or {}
        packet = func._overloadpacket
        key = "" if packet in _VIEW_OPS or packet in _IGNORE_OPS else repr((str(func), _shapes((args, kwargs))))
        if key and key not in self._known:
            self._known[key] = self._time(func, args, kwargs)
        result = func(*args, **kwargs)
        self._held.append(result)
        return result, self._known.get(key, 0.0)

    def _time(self, func: Any, args: Any, kwargs: Any) -> float:
        from torch.utils._mode_utils import no_dispatch
        from torch.utils._pytree import tree_map

        with no_dispatch():
            real_args, real_kwargs = tree_map(partial(_with_data, device=self._device), (args, kwargs))
            times = []
            for _ in range(_NUM_TIMED + 1):
                start_s = time.perf_counter()
                func(*real_args, **real_kwargs)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                times.append((time.perf_counter() - start_s) * 1000)
        return min(times[1:])


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), str(value.dtype))
    if isinstance(value, dict):
        return {name: _shapes(item) for name, item in value.items()}
    return [_shapes(item) for item in value] if isinstance(value, list | tuple) else value


def _with_data(value: Any, *, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.fill_(0.5) if value.dtype.is_floating_point else made.fill_(1)


@contextmanager
def _without_packing() -> Iterator[None]:
    """transformers looks whether positions start again inside a row, as packed sequences' do, and then writes a mask out; of
    tensors without data it takes for granted that they do. Here they never do."""
    import transformers.masking_utils as masking

    find: Any = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda *args, **kwargs: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find


def _on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """``Module.to`` refuses tensors without data that something else refers to."""
    if device.type == "cpu":
        return model
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            key = id(parameter)
            if key not in moved:
                moved[key] = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, moved[key])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
    return model


def _run(model: nn.Module, ids: torch.Tensor) -> None:
    loss: Any = model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss
    loss.backward()


def _read(blocks: Sequence[str], tracker: Any, estimator: Any, device: torch.device) -> Statistics:
    """Aggregate statistics as ``ilp_utils.aggregate_stats`` does, for the modules that have a backward."""
    from torch.distributed._tools.mem_tracker import _MemRefType, _ModState

    def bytes_at(stats: Any, state: Any, kind: Any) -> int:
        return int(stats.snapshots[state][-1][device][kind])

    tracked = {stats.mod_fqn: stats for stats in tracker.memory_tracking.values()}
    found = {name: stats for name, stats in tracked.items() if _ModState.PEAK_BW in stats.snapshots}
    root = next(iter(tracked))
    units = []
    for name in (f"{root}.{block}" for block in blocks):
        stats = found[name]
        grown = bytes_at(stats, _ModState.POST_FW, _MemRefType.ACT) - bytes_at(stats, _ModState.PRE_FW, _MemRefType.ACT)
        ops = estimator.sac_mod_stats[name]
        saved_bytes = max(0, grown - stats.output_mem)
        units.append(
            Unit(
                name=name,
                saved_bytes=saved_bytes,
                # Where the two estimators contradict each other, the tracker is believed, as by ``sac_milp``.
                made_bytes=max(saved_bytes, sum(ops.memory)),
                forward_ms=sum(ops.runtimes),
                lines=fit_lines(*trade_off(ops, estimator.sac_mod_greedy_order_meta[name])),
                ops=ops,
            )
        )
    ends = {unit.name: index for index, unit in enumerate(units)}
    moments = []
    for name, stats in found.items():
        temporaries = bytes_at(stats, _ModState.PEAK_BW, _MemRefType.TEMP)
        temporaries -= bytes_at(stats, _ModState.PRE_BW, _MemRefType.TEMP)
        live_bytes = bytes_at(stats, _ModState.POST_FW, _MemRefType.ACT) + temporaries
        live_bytes += found[root].parameter_mem + bytes_at(stats, _ModState.PRE_BW, _MemRefType.GRAD)
        moments.append(Moment(live_bytes=live_bytes, units_before=_ended_before(name, ends, list(found))))
    return Statistics(units=tuple(units), moments=tuple(moments))


def _ended_before(name: str, ends: Mapping[str, int], in_order: Sequence[str]) -> tuple[int, ...]:
    """Blocks that end before the module does: what holds a block ends after it, all else in order of beginning."""
    place = {other: index for index, other in enumerate(in_order)}
    return tuple(
        index
        for unit, index in ends.items()
        if unit.startswith(f"{name}.") or (place[unit] < place[name] and not name.startswith(f"{unit}.") and name != unit)
    )


def trade_off(ops: Any, order: Any) -> tuple[Floats, Floats]:
    """Trade-off of one block as in ``SACEstimator._get_sac_tradeoff_pwlf_stats``: shares of bytes and of time."""
    def grouped(heads: Any) -> set[int]:
        members = {member for head in heads for member in order.inplace_op_groups.get(head, ())}
        members |= {member for head in heads for member in order.random_ops_group.get(head, ())}
        return members | set(heads)

    total_bytes, total_ms = max(1, sum(ops.memory)), max(1e-9, sum(ops.runtimes))
    first = grouped(order.recomputed_ops)
    spent = [(sum(ops.memory[index] for index in first), sum(ops.runtimes[index] for index in first))]
    steps = [(candidate.memory, candidate.runtime) for candidate in order.msps_meta]
    stored = grouped(order.stored_ops)
    steps.append((sum(ops.memory[index] for index in stored), sum(ops.runtimes[index] for index in stored)))
    for num_bytes, ms in steps:
        spent.append((spent[-1][0] + num_bytes, spent[-1][1] + ms))
    # Shares are shifted, as there: so many bytes cost the time of the next step.
    curve = {num_bytes / total_bytes + 1e-2: ms / total_ms for num_bytes, ms in spent}
    shares, times = np.array(list(curve)), np.array(list(curve.values()))
    return shares[:-1], times[1:]


def fit_lines(shares: Floats, times: Floats) -> tuple[tuple[float, float], ...]:
    """Slopes and intercepts of the one or two connected lines that are nearest in squares; convex or not, as torch takes them."""
    if len(shares) < 2 or np.ptp(shares) == 0:
        return ((float(times[-1] / max(shares[-1], 1e-9)), 0.0),)
    if len(shares) < 4:
        slope, intercept = np.polyfit(shares, times, 1)
        return ((float(slope), float(intercept)),)
    best: tuple[float, Floats, float] | None = None
    for place in np.linspace(shares.min(), shares.max(), _NUM_BREAKS + 2)[1:-1]:
        design = np.stack([np.ones_like(shares), shares, np.maximum(shares - place, 0.0)], axis=1)
        solution = np.linalg.lstsq(design, times, rcond=None)[0]
        error = float(np.square(design @ solution - times).sum())
        if best is None or error < best[0]:
            best = error, solution, float(place)
    if best is None:
        raise RuntimeError("no place of a break was tried")
    _, (start, slope, bend), place = best
    return (float(slope), float(start)), (float(slope + bend), float(start - bend * place))
