"""The models that run for real, and the amount of measuring. On the CPU device they have 3 to 4 million parameters and steps of
some 150 ms on two cores."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common.parts import Options
from benchmarks.search.rivals.contenders import BUDGETS, FUSED_BUDGETS, NUM_POLICIES
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.runtime.meter.device import set_num_threads
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and the shape of its step."""

    name: str
    spec: ModelSpec
    batch_size: int
    sequence_length: int

    @property
    def workload(self) -> TrainingWorkload:
        return TrainingWorkload(
            sequence_length=self.sequence_length, global_batch_size=self.batch_size, learning_rate=1e-4
        )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The subjects of a run, its budgets and its rounds."""

    subjects: tuple[Subject, ...]
    calibration_subjects: tuple[Subject, ...]
    """Other models, whose runs correct the probed machine."""
    num_budgets: int = 12
    num_below: int = 3
    """Smaller ones, for which deciding about blocks is not enough."""
    num_calibration_plans: int = 8
    screening_rounds: int = 2
    min_rounds: int = 7
    max_rounds: int = 40
    race_s: float = 60.0
    """Seconds for all races at budgets of one subject; rounds are as many as that allows."""
    probe_s: float = 12.0
    budgets: tuple[float, ...] = BUDGETS
    fused_budgets: tuple[float, ...] = FUSED_BUDGETS
    num_policies: int = NUM_POLICIES
    draws_quickly: bool = False
    processor_time: bool = False
    """Steps run in one thread, and are timed by what the process takes of the processor."""


def rotary(model_type: str, hidden: int, blocks: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """A configuration of the Llama kind."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        **more,
    }


def gpt2(hidden: int, blocks: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": blocks, "n_head": 4, "vocab_size": vocabulary, "n_positions": 1024,
    }  # fmt: skip


def opt(hidden: int, blocks: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden,
        "num_hidden_layers": blocks, "num_attention_heads": 4, "vocab_size": vocabulary, "max_position_embeddings": 1024,
    }  # fmt: skip


def subject(name: str, config: dict[str, Any], batch_size: int, sequence_length: int) -> Subject:
    return Subject(
        name=name, spec=read_model_spec(config), batch_size=batch_size, sequence_length=sequence_length
    )


def full_setup() -> Setup:
    return Setup(
        subjects=(
            subject("llama", rotary("llama", 192, 8, 2048), 4, 96),
            subject("gpt2", gpt2(192, 8, 2048), 4, 96),
            subject("qwen2, tied", rotary("qwen2", 160, 10, 2048, tie_word_embeddings=True), 4, 96),
            subject("gemma2", rotary("gemma2", 160, 8, 2048, head_dim=40, sliding_window=64), 4, 96),
        ),
        calibration_subjects=(
            subject("llama", rotary("llama", 256, 4, 2048), 4, 128),
            subject("opt", opt(192, 4, 4096), 4, 96),
        ),
    )


def quick_setup() -> Setup:
    return Setup(
        subjects=(subject("llama", rotary("llama", 96, 4, 512), 4, 64),),
        calibration_subjects=(subject("llama", rotary("llama", 64, 3, 512), 4, 64),),
        num_budgets=3,
        num_below=1,
        num_calibration_plans=4,
        screening_rounds=2,
        min_rounds=3,
        race_s=5.0,
        probe_s=2.0,
        budgets=(0.25,),
        fused_budgets=(),
        num_policies=2,
    )


def setup_for(options: Options) -> Setup:
    """The setup for a device; also sets the number of threads that its steps take."""
    if options.device.type == "cuda":
        return cuda_setup(quick=options.quick)
    setup = quick_setup() if options.quick else full_setup()
    set_num_threads()
    if options.processor_time:
        torch.set_num_threads(1)
    return replace(setup, processor_time=options.processor_time)


def cuda_setup(*, quick: bool) -> Setup:
    """One model of 110 million parameters in fp32, so that six contenders fit beside each other on a card of 16 GB."""
    return Setup(
        subjects=(subject("llama", rotary("llama", 768, 12, 16_384, num_attention_heads=12, num_key_value_heads=4), 4, 1024),),
        calibration_subjects=(subject("llama", rotary("llama", 512, 6, 8192), 8, 512),),
        num_budgets=4 if quick else 12,
        race_s=20.0 if quick else 150.0,
        probe_s=4.0 if quick else 10.0,
        fused_budgets=() if quick else FUSED_BUDGETS,
        draws_quickly=True,
    )  # fmt: skip
