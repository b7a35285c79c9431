"""What is generated for real. On the CPU device models of some ten million parameters, so that a whole workload takes seconds.

``opt`` has as many heads of keys as of queries, as the models had on which offloading was first measured; ``llama`` groups them,
so that its cache is a quarter of that.
"""

from dataclasses import dataclass

from benchmarks.search.subjects import opt, rotary
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.workload import InferenceWorkload


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and what is asked of it."""

    name: str
    spec: ModelSpec
    workload: InferenceWorkload


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How much is measured."""

    subjects: tuple[Subject, ...]
    probe_s: float = 12.0
    num_rounds: int = 3


def _subject(name: str, config: dict[str, object], *, prompt_length: int, num_new_tokens: int, num_sequences: int) -> Subject:
    workload = InferenceWorkload(
        prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=num_sequences
    )
    return Subject(name=name, spec=read_model_spec(config), workload=workload)


def full_setup() -> Setup:
    return Setup(
        subjects=(
            _subject("opt", opt(384, 12, 2048), prompt_length=32, num_new_tokens=96, num_sequences=256),
            _subject(
                "llama",
                rotary("llama", 384, 12, 2048, num_attention_heads=8, num_key_value_heads=2),
                prompt_length=32,
                num_new_tokens=96,
                num_sequences=256,
            ),
        )
    )


def quick_setup() -> Setup:
    return Setup(
        subjects=(_subject("opt", opt(128, 6, 512), prompt_length=16, num_new_tokens=12, num_sequences=32),),
        probe_s=3.0,
        num_rounds=1,
    )


def cuda_setup(*, quick: bool) -> Setup:
    """Two models of a few billion parameters in fp32; a card's cap is a quarter of their weights."""
    return Setup(
        subjects=(
            _subject(
                "opt",
                opt(2048 if quick else 2560, 12 if quick else 32, 50_272),
                prompt_length=512,
                num_new_tokens=32,
                num_sequences=64 if quick else 256,
            ),
        ),
        num_rounds=1,
    )
