"""The models that generate for real: on the CPU device of some ten million parameters, so that a workload takes seconds.

``opt`` has as many heads of keys as of queries, as the models had on which offloading was first measured; ``llama`` groups them,
so that its cache is a quarter of that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common.parts import Options
from benchmarks.search.subjects import opt, rotary
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.workload import GenerationWorkload


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and what is asked of it."""

    name: str
    spec: ModelSpec
    workload: GenerationWorkload
    num_larger: int
    """Sequences whose keys and values make the whole four times the device's room."""

    @property
    def larger_workload(self) -> GenerationWorkload:
        return replace(self.workload, num_sequences=self.num_larger)

    @property
    def swept_workload(self) -> GenerationWorkload:
        """Short enough to be run dozens of times."""
        return replace(
            self.workload,
            num_sequences=self.num_larger,
            num_new_tokens=max(2, self.workload.num_new_tokens // 8),
        )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The models of a run and the number of its rounds."""

    subjects: tuple[Subject, ...]
    calibration_subjects: tuple[Subject, ...]
    """Other models, whose runs correct the probed machine."""
    probe_s: float = 12.0
    num_rounds: int = 3
    num_swept_rounds: int = 3
    """Rounds of every plan of a sweep, each timed twice: the median of three runs of a second may be a third off."""
    num_plans: int = 10
    """Plans of each sweep."""


def _subject(
    name: str, config: dict[str, Any], *, prompt_length: int, num_new_tokens: int, num_sequences: int, num_larger: int
) -> Subject:
    workload = GenerationWorkload(
        prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=num_sequences
    )
    return Subject(name=name, spec=read_model_spec(config), workload=workload, num_larger=num_larger)


REFERENCE = _subject(
    "reference",
    rotary("mistral", 512, 8, 1024, num_attention_heads=8, num_key_value_heads=4),
    prompt_length=24,
    num_new_tokens=6,
    num_sequences=32,
    num_larger=32,
)
"""Some tenths of a second on two cores, of weights that no cache of theirs holds."""


def full_setup() -> Setup:
    return Setup(
        subjects=(
            _subject("opt", opt(384, 12, 2048), prompt_length=32, num_new_tokens=96, num_sequences=256, num_larger=48),
            _subject(
                "llama",
                rotary("llama", 384, 12, 2048, num_attention_heads=8, num_key_value_heads=2),
                prompt_length=32,
                num_new_tokens=96,
                num_sequences=256,
                num_larger=96,
            ),
        ),
        calibration_subjects=(
            _subject(
                "qwen2", rotary("qwen2", 256, 6, 2048), prompt_length=48, num_new_tokens=48, num_sequences=64, num_larger=32
            ),
            _subject(
                "mistral",
                rotary("mistral", 512, 8, 4096, num_attention_heads=8, num_key_value_heads=4),
                prompt_length=24,
                num_new_tokens=96,
                num_sequences=64,
                num_larger=64,
            ),
        ),
    )


def quick_setup() -> Setup:
    return Setup(
        subjects=(_subject("opt", opt(128, 24, 256), prompt_length=16, num_new_tokens=12, num_sequences=32, num_larger=32),),
        calibration_subjects=(
            _subject(
                "llama", rotary("llama", 96, 4, 512), prompt_length=16, num_new_tokens=12, num_sequences=16, num_larger=8
            ),
        ),
        probe_s=3.0,
        num_rounds=1,
        num_swept_rounds=1,
        num_plans=4,
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
                num_larger=32,
            ),
        ),
        calibration_subjects=(
            _subject(
                "llama", rotary("llama", 1024, 8, 16_384), prompt_length=256, num_new_tokens=32, num_sequences=64, num_larger=32
            ),
        ),
        num_rounds=1,
        num_swept_rounds=1,
    )


def wanted_of(subjects: Iterable[Subject], options: Options) -> list[Subject]:
    """Those that ``--of`` names; all without it."""
    return [subject for subject in subjects if options.wants(subject.name)]


def setup_of(options: Options) -> Setup:
    if options.device.type == "cuda":
        return cuda_setup(quick=options.quick)
    return quick_setup() if options.quick else full_setup()
