"""Plans of a generation that change none of its tokens, the models and prompts that tests give them, and transformers' tokens."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.job.measure_generation import make_prompts
from optimizer.workload import GenerationWorkload

CPU = torch.device("cpu")
NUM_NEW = 8
LOSSLESS = [
    GenerationPlan(
        batch_size=2,
        num_micro_batches=1 + turn % 2,
        prefill_tokens=(None, 3)[turn % 3 == 1],
        weights=WeightsPlan(place=weights),
        kv_cache=KvCachePlan(place=cache, prefetch=prefetch),
    )
    for turn, (weights, (cache, prefetch)) in enumerate(
        product(("device", "host", "disk"), (("device", 1), ("host", 0), ("disk", 1), ("host", 2), ("disk", 2)))
    )
]
_REMOTE = KvCachePlan(place="remote")
_ON_HOST = KvCachePlan(place="host", attention="host")
LOSSLESS += [
    GenerationPlan(
        batch_size=2,
        num_micro_batches=num_micro_batches,
        prefill_tokens=prefill_tokens,
        weights=WeightsPlan(place=weights),
        kv_cache=kv_cache,
    )
    for weights, num_micro_batches, prefill_tokens, kv_cache in (
        ("device", 2, 3, replace(_REMOTE, prefetch=0)),
        ("host", 1, None, replace(_REMOTE, prefetch=1)),
        ("disk", 2, None, replace(_REMOTE, prefetch=2)),
        ("device", 1, None, _ON_HOST),
        ("host", 2, 3, _ON_HOST),
        ("disk", 2, None, _ON_HOST),
    )
]


def build(config: dict[str, Any]) -> Any:
    """Build a model with weights large enough that tokens differ from place to place."""
    model = build_model(read_model_spec(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def prompts_of(length: int, num_sequences: int = 3) -> torch.Tensor:
    return make_prompts(128, GenerationWorkload(prompt_length=length, num_sequences=num_sequences))


def generate(
    model: Any, prompts: torch.Tensor, plan: GenerationPlan, *, num_new: int = NUM_NEW, scratch: Path | None = None
) -> torch.Tensor:
    generator = Generator(model, plan=plan, device=CPU, scratch=scratch)
    try:
        return generator.generate(prompts, num_new_tokens=num_new)
    finally:
        generator.close()


def expected_tokens(model: Any, prompts: torch.Tensor, num_new: int = NUM_NEW) -> torch.Tensor:
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    tokens = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_new, do_sample=False, use_cache=True
    )
    return tokens[:, prompts.shape[1] :]
