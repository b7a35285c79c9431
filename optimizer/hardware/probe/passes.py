"""What an op costs beside its kernel where nothing is to be differentiated: the runtime's own generation with a tiny model.

Not counted by the meter, as ``steps.py``'s steps are not.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.hardware.probe import clock
from optimizer.hardware.probe.tiny import tiny_spec
from optimizer.plan.inference import InferencePlan
from optimizer.runtime.inference import Generator, build_for_inference

_NUM_BLOCKS = 2
_PROMPT_LENGTH, _NUM_NEW_TOKENS = 8, 8
_MAX_PASSES = 10


def probe_pass_dispatch_s(device: torch.device, *, max_s: float) -> float:
    """Of each op, views included; of the least of a few passes."""
    spec, plan = tiny_spec(_NUM_BLOCKS), InferencePlan(batch_size=1)
    prompts = [torch.zeros((1, _PROMPT_LENGTH), dtype=torch.long)]
    generator = Generator(build_for_inference(spec, weights=plan.weights, device=device), plan=plan, device=device)

    def run() -> float:
        (done,) = generator.run_passes(prompts, num_new_tokens=_NUM_NEW_TOKENS)
        return (done.prefill_ms + done.decode_ms) / 1000

    try:
        counter = _Counter()  # type: ignore[no-untyped-call]
        with counter:
            run()
        share = clock.Share(max_s)
        times = [run()]
        while share.left_s and len(times) < _MAX_PASSES:
            times.append(run())
    finally:
        generator.close(keep_weights=False)
    return min(times) / counter.num_ops


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))
