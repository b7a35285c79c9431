"""Generation with packed and moved caches: lossless plans give transformers' tokens, packed ones stay within a bound."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.runtime.generation.generator import Generator
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import CPU, LOSSLESS, build, expected_tokens, generate, prompts_of
from tests.valkey import Valkey

MODELS = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "stablelm",
    "starcoder2",
)
LENGTH = 14
"""The windows are 16: crossed by the new tokens."""


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_every_lossless_plan_gives_the_tokens_of_transformers(name: str, tmp_path: Path, remote: Valkey) -> None:
    model, prompts = build(SMALL_CONFIGS[name]), prompts_of(LENGTH)
    expected = expected_tokens(model, prompts)
    assert len(expected.unique()) > 2
    for plan in LOSSLESS:
        assert plan.is_lossless
        # A copy: what was read from the disk cannot leave the device again.
        tokens = generate(copy.deepcopy(model), prompts, plan, scratch=tmp_path)
        assert torch.equal(tokens, expected), plan


# Packed.


def logits_of(model: Any, prompts: torch.Tensor, tokens: torch.Tensor, cache: KvCachePlan) -> torch.Tensor:
    """[steps, batch, words]: of each step after the prompt, given these tokens."""
    generator = Generator(model, plan=GenerationPlan(batch_size=len(prompts), kv_cache=cache), device=CPU)
    kept = generator.make_cache(capacity=prompts.shape[1] + tokens.shape[1])
    found = []
    with torch.no_grad():
        for ids in (prompts, *tokens.split(1, dim=1)):
            found.append(model(input_ids=ids, past_key_values=kept, use_cache=True).logits[:, -1])
    generator.close()
    return torch.stack(found)


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama", "mistral", "opt", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.02), ("int4", 0.3)])
def test_packed_caches_change_logits_by_no_more_than_stated(name: str, dtype: str, bound: float) -> None:
    """The change is the root mean square against the spread of the logits; a token changes only if it was as near to another."""
    config = {**SMALL_CONFIGS[name], "max_position_embeddings": 512, "n_positions": 512}
    if name != "gpt2":
        del config["n_positions"]
    if "sliding_window" in config:
        config["sliding_window"] = 100
    model = build_model(read_model_spec(config)).eval()
    prompts = prompts_of(200, 2)
    tokens = torch.randint(128, (2, 100), generator=torch.Generator().manual_seed(3))
    exact, packed = (logits_of(model, prompts, tokens, KvCachePlan(dtype=each)) for each in ("same", dtype))
    assert torch.equal(packed[0], exact[0])
    error, spread = (packed - exact), exact.std()
    assert 0 < error.square().mean().sqrt() <= bound * spread
    best = exact.topk(2, dim=-1).values
    changed = packed.argmax(dim=-1) != exact.argmax(dim=-1)
    margins = (best[..., 0] - best[..., 1])[changed]
    assert (margins <= 2 * error.abs().amax(dim=-1)[changed]).all()
