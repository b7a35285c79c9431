"""Keys and values in 8 and 4 bits over 2,000 decoded tokens: how far the logits are from the exact ones, and whether that grows.

Both caches are given the same tokens, so that what differs is what packing did. A block of tokens is packed once and never again,
so the error of a token far on is that of the first ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, get_args

import torch
from torch import nn

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, at_most, clear
from benchmarks.search.subjects import opt, rotary
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan, KvDtype
from optimizer.runtime.generation.generator import Generator

NAME = "drift"
NUM_STEPS, QUICK_STEPS = 2_000, 400
NUM_STRETCHES = 4
BOUNDS: Final[Mapping[str, float]] = {"int8": 0.02, "int4": 0.3}
"""Largest root mean square error of the logits, as a share of their spread; the same as in the runtime's tests."""
GROWTH_GOAL = 1.25
"""Largest error of the last stretch of steps over that of the first."""
_PROMPT_LENGTH, _NUM_SEQUENCES, _VOCAB = 64, 2, 512
_PACKED: Final[tuple[KvDtype, ...]] = tuple(dtype for dtype in get_args(KvDtype) if dtype != "same")


def measure(options: Options) -> Iterator[Row]:
    num_steps = QUICK_STEPS if options.quick else NUM_STEPS
    positions = _PROMPT_LENGTH + num_steps
    for name, config in (
        ("opt", {**opt(128, 2, _VOCAB), "max_position_embeddings": positions}),
        ("llama", {**rotary("llama", 128, 2, _VOCAB, num_key_value_heads=2), "max_position_embeddings": positions}),
    ):
        model = build_model(read_model_spec(config), dtype=torch.float32, device=options.device, seed=options.seed).eval()
        drawn = torch.randint(
            _VOCAB, (_NUM_SEQUENCES, positions), generator=torch.Generator().manual_seed(options.seed)
        )
        tokens = drawn.to(options.device)
        exact = list_logits(model, tokens, "same")
        for dtype in _PACKED:
            packed = list_logits(model, tokens, dtype)
            errors = relative_errors(packed, exact, num_stretches=NUM_STRETCHES)
            yield {
                "part": NAME,
                "what": "drift",
                "model": name,
                "dtype": dtype,
                "num_steps": num_steps,
                "errors": [round(error, 5) for error in errors],
                "worst": round(max(errors), 5),
                "growth": round(errors[-1] / errors[0], 3),
            }
        clear()


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    run = [row for row in rows if row.get("what") == "drift"]
    found = {}
    for dtype in _PACKED:
        worst = max((row["worst"] for row in run if row["dtype"] == dtype), default=None)
        found[f"{dtype} keys and values, worst error of logits by their spread"] = at_most(worst, BOUNDS[dtype])
    growth = max((row["growth"] for row in run), default=None)
    found["growth of that error, last stretch over first"] = at_most(growth, GROWTH_GOAL)
    return found


PART = Part(name=NAME, measure=measure, summarize=summarize)


def list_logits(model: nn.Module, tokens: torch.Tensor, dtype: KvDtype) -> torch.Tensor:
    """Logits [steps, sequences, words] of each step after the prompt, given these tokens."""
    plan = GenerationPlan(batch_size=len(tokens), kv_cache=KvCachePlan(dtype=dtype))
    generator = Generator(model, plan=plan, device=tokens.device)
    cache = generator.make_cache(capacity=tokens.shape[1])
    prompt, later = tokens[:, :_PROMPT_LENGTH], tokens[:, _PROMPT_LENGTH:]
    found = []
    try:
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, use_cache=True)
            for ids in torch.split(later, 1, dim=1):
                found.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1])
    finally:
        generator.close()
    return torch.stack(found)


def relative_errors(found: torch.Tensor, exact: torch.Tensor, *, num_stretches: int) -> list[float]:
    """Root mean square error by the spread of what is exact, of each stretch of steps."""
    return [
        float((part - right).square().mean().sqrt() / right.std())
        for part, right in zip(found.chunk(num_stretches), exact.chunk(num_stretches), strict=True)
    ]
