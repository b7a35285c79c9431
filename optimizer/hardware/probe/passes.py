"""What an op costs beside its kernel where nothing is to be differentiated: the runtime's own generation with a tiny model.

Not counted by the meter, as ``steps.py``'s steps are not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.hardware.probe import clock
from optimizer.hardware.probe.tiny import tiny_spec
from optimizer.plan.inference import InferencePlan
from optimizer.runtime.inference import Generator, build_for_inference

_NUM_BLOCKS = (2, 6)
_PROMPT_LENGTH, _NUM_NEW_TOKENS = 8, 8
_MAX_PASSES = 20


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Seconds beside kernels (``Rates``)."""

    dispatch_s: float
    """Of each op, views included: what more blocks take longer, over their ops."""
    token_s: float
    """Of each forward pass, beside its ops."""


def probe_passes(device: torch.device, *, max_s: float) -> PassCosts:
    """Of the least of a few passes, taken in turn."""
    share = clock.Share(max_s)
    generations = [_Generation(num_blocks, device) for num_blocks in _NUM_BLOCKS]
    try:
        few, many = (generation.count_ops() for generation in generations)
        times: list[list[float]] = []
        while not times or (share.left_s and len(times) < _MAX_PASSES):
            times.append([generation.run() for generation in generations])
    finally:
        for generation in generations:
            generation.generator.close(keep_weights=False)
    few_s, many_s = (min(column) for column in zip(*times, strict=True))
    dispatch_s = max(many_s - few_s, many_s / 20) / (many - few)
    return PassCosts(dispatch_s=dispatch_s, token_s=max(0.0, few_s - few * dispatch_s) / _NUM_NEW_TOKENS)


class _Generation:
    def __init__(self, num_blocks: int, device: torch.device) -> None:
        plan = InferencePlan(batch_size=1)
        model = build_for_inference(tiny_spec(num_blocks), weights=plan.weights, device=device)
        self.generator = Generator(model, plan=plan, device=device)
        self._prompts = torch.zeros((1, _PROMPT_LENGTH), dtype=torch.long)

    def run(self) -> float:
        begin_s = clock.now_s()
        self.generator.generate(self._prompts, num_new_tokens=_NUM_NEW_TOKENS)
        return clock.now_s() - begin_s

    def count_ops(self) -> int:
        counter = _Counter()  # type: ignore[no-untyped-call]
        with counter:
            self.run()
        return counter.num_ops


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))
