"""Cost of an op beside its kernel where nothing is to be differentiated: the runtime's own generation with a tiny model.

Not counted by the meter, as ``steps.py``'s steps are not. And what it takes to draw a token, which hangs on the vocabulary alone.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.formats.sampling import Sampling
from optimizer.hardware.curves import DRAW, Curve
from optimizer.hardware.probe import clock
from optimizer.hardware.probe.steps import COPIES
from optimizer.hardware.probe.thread_wakeup import alone
from optimizer.hardware.probe.tiny import tiny_spec
from optimizer.hardware.rates import PythonWork
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import Generator, build_for_generation
from optimizer.runtime.generation.sampling import Chooser

_NUM_BLOCKS = (2, 6)
_PROMPT_LENGTH, _NUM_NEW_TOKENS = 8, 8
_MAX_PASSES = 20
_VOCAB_SIZES = (32_768, 4_096, 131_072)


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Seconds beside kernels (``Rates``)."""

    dispatch_s: float
    """Seconds of each op, views included: what more blocks take longer, over their ops."""
    python_s: dict[PythonWork, float]
    """``token`` for each forward pass, beside its ops; of what comes and goes (``Rates.python_s``) what the same generation takes
    longer with it on the host, and on the disk."""


def probe_passes(device: torch.device, *, scratch: Path | None, max_s: float) -> PassCosts:
    """Costs by the least of a few passes, taken in turn. scratch: None where there is no disk."""
    share = clock.TimeShare(max_s)
    away: dict[PythonWork, GenerationPlan] = {
        "keys and values": GenerationPlan(kv_cache=KvCachePlan(place="host")),
        "weights of a pass": GenerationPlan(weights=WeightsPlan(place="host")),
    }
    if scratch is not None:
        away |= {
            "stored keys and values": GenerationPlan(kv_cache=KvCachePlan(place="disk")),
            "stored weights": GenerationPlan(weights=WeightsPlan(place="disk")),
        }
    plans = (*(GenerationPlan() for _ in _NUM_BLOCKS), *away.values())
    sizes = (*_NUM_BLOCKS, *_NUM_BLOCKS[-1:] * len(away))
    with ExitStack() as stack:
        generations = [
            stack.enter_context(_Generation(num_blocks, plan, device, scratch))
            for num_blocks, plan in zip(sizes, plans, strict=True)
        ]
        counted = [generation.count_ops() for generation in generations]
        times: list[list[float]] = []
        with alone(device):
            while not times or (share.left_s and len(times) < _MAX_PASSES):
                times.append([generation.run() for generation in generations])
    few_s, many_s, *away_s = (min(column) for column in zip(*times, strict=True))
    few, many, *coming = counted
    dispatch_s = max(many_s - few_s, many_s / 20) / (many.num_ops - few.num_ops)
    num_turns = _NUM_BLOCKS[-1] * _NUM_NEW_TOKENS
    num_comings = [
        max(1, count.num_copies - many.num_copies) if plan.weights.place != "device" else num_turns
        for plan, count in zip(away.values(), coming, strict=True)
    ]
    return PassCosts(
        dispatch_s=dispatch_s,
        python_s={"token": max(0.0, few_s - few.num_ops * dispatch_s) / _NUM_NEW_TOKENS}
        | {
            what: max(0.0, seconds - many_s) / number
            for what, seconds, number in zip(away, away_s, num_comings, strict=True)
        },
    )


def probe_draws(device: torch.device, *, max_s: float) -> dict[str, Curve]:
    """Rates of drawing by the number of scores, under ``draw``."""
    share = clock.TimeShare(max_s)
    points = []
    for index, vocab_size in enumerate(_VOCAB_SIZES):
        if index and not share.left_s:
            break
        logits = clock.random_tensor((vocab_size,), device, torch.float32)
        token = torch.zeros((), dtype=torch.long, device=device)
        chooser = Chooser(Sampling(max_new_tokens=1, temperature=0.8, top_p=0.9))
        seconds = clock.quartile_s(
            partial(chooser.draw, logits, into=token), device, max_s=share.part_s(len(_VOCAB_SIZES) - index)
        )
        points.append((float(vocab_size), vocab_size / seconds))
    return {DRAW: clock.as_curve(points)}


class _Generation:
    def __init__(self, num_blocks: int, plan: GenerationPlan, device: torch.device, scratch: Path | None) -> None:
        model = build_for_generation(tiny_spec(num_blocks), weights=plan.weights, device=device)
        self._generator = Generator(model, plan=plan, device=device, scratch=scratch)
        self._prompts = torch.zeros((1, _PROMPT_LENGTH), dtype=torch.long)

    def __enter__(self) -> "_Generation":
        return self

    def __exit__(self, *error: object) -> None:
        self._generator.close(keep_weights=False)

    def run(self) -> float:
        begin_s = clock.now_s()
        self._generator.generate(self._prompts, num_new_tokens=_NUM_NEW_TOKENS)
        return clock.now_s() - begin_s

    def count_ops(self) -> "_Counter":
        counter = _Counter()  # type: ignore[no-untyped-call]
        with counter:
            self.run()
        return counter


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    num_ops = 0
    num_copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_ops += 1
        self.num_copies += func in COPIES
        return func(*args, **(kwargs or {}))
