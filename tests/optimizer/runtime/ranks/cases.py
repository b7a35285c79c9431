"""Cases that ranks carry out and are compared in: model, plan and workload, as JSON; declared, or drawn with a fixed seed."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from optimizer.base.errors import HeadroomError
from optimizer.base.serialize import from_json, to_json
from optimizer.data.batches import IGNORED_LABEL
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DATA_PARALLEL, DeviceLayout, RankShare
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "intermediate_size": 172,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    **SMALL_CONFIGS,
    "decoder": {"model_type": "headroom_decoder", **_SIZES, "attention_block": 8, "bos_token_id": 0, "eos_token_id": 0},
    "tied": {"model_type": "headroom_decoder", **_SIZES, "attention_block": 8, "tie_word_embeddings": True},
    "shared": {"model_type": "headroom_decoder", **_SIZES, "num_hidden_layers": 4, "attention_block": 8, "share_every": 2},
    "untied": {"model_type": "headroom_decoder", **_SIZES, "attention_block": 8, "tie_word_embeddings": False},
    "deep": {
        "model_type": "headroom_decoder",
        **_SIZES,
        "num_hidden_layers": 4,
        "attention_block": 8,
        "tie_word_embeddings": False,
    },
    "llama": {"model_type": "llama", **_SIZES},
    "opt-350m-less": {**SMALL_CONFIGS["opt"], "word_embed_proj_dim": 32},
    "gpt2-untied": {**SMALL_CONFIGS["gpt2"], "tie_word_embeddings": False},
}
_DRAWN = ("decoder", "tied", "shared")
"""Models that a process builds without transformers, whose import takes seconds."""
NUM_STEPS = 3
SEED = 20261126


@dataclass(frozen=True, kw_only=True)
class RankCase:
    """One comparison of several ranks with one device."""

    model: str
    """Key of ``MODELS``."""
    plan: Plan
    """For ``plan.layout.num_devices`` ranks."""
    workload: TrainingWorkload
    has_uneven_labels: bool = False
    """Some labels do not count, more in one micro-batch than in the next."""
    trains: str = ""
    """End of the names of the parameters that are trained; the others are frozen."""

    splits: tuple[int, ...] = ()
    """Sequences of each micro-batch on one device, where ranks that take other sizes are compared with it."""

    @property
    def num_ranks(self) -> int:
        return self.plan.layout.num_devices

    @property
    def name(self) -> str:
        plan = self.plan
        words = [self.model, f"{self.num_ranks}x{plan.batch.accumulation_steps}", plan.layout.data, plan.gradients.choice]
        words += [plan.weights.dtype, f"{plan.optimizer_state.place}{plan.optimizer_state.bits}", self.workload.optimizer]
        words += sorted(set(plan.activations.per_block))
        words += [f"{plan.layout.schedule}-{'+'.join(map(str, plan.layout.stage_blocks))}"] if plan.layout.is_cut else []
        alone = f"every{plan.layout.sync_every}-{plan.layout.sync_format}-{plan.layout.sync_rule}"
        words += [alone] if plan.layout.steps_alone else []
        words += [f"{plan.layout.replicas}-replicas"] if plan.layout.replicas > 1 else []
        words += ["tensor"] if plan.layout.shares_blocks else []
        batches = [each.batch for each in plan.of_ranks() if self._differ]
        words += [f"{batch.accumulation_steps}x{batch.micro_batch_size}" for batch in batches]
        return "-".join(words)

    @property
    def has_two_terms(self) -> bool:
        """True if each sum over micro-batches is one of two numbers, which has no order."""
        return len(self._sizes) == 2 and not self.plan.layout.shares_blocks

    @property
    def on_one_device(self) -> "RankCase":
        """The same micro-batches on one device; gradients that are consumed there would be consumed too soon."""
        batch = replace(self.plan.batch, accumulation_steps=self.plan.batch.accumulation_steps * self.plan.layout.num_parts)
        choice = "keep" if self.plan.gradients.choice == "consume" else self.plan.gradients.choice
        gradients = GradientsPlan(choice=choice)
        if self._differ:
            batch = BatchPlan(micro_batch_size=1, accumulation_steps=self.workload.global_batch_size)
            plan = replace(self.plan, layout=DeviceLayout(), batch=batch, gradients=gradients)
            return replace(self, plan=plan, splits=self._sizes)
        return replace(self, plan=replace(self.plan, layout=DeviceLayout(), batch=batch, gradients=gradients))

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "RankCase":
        return from_json(cls, document, path="case")

    def make_model(self, *, rank: int = 0) -> nn.Module:
        spec = read_model_spec({**MODELS[self.model], "num_hidden_layers": len(self.plan.activations.per_block)})
        model = build_prepared(
            spec,
            weights=self.plan.weights,
            workload=self.workload,
            device=torch.device("cpu"),
            layout=self.plan.layout,
            rank=rank,
        )
        for name, parameter in model.named_parameters():
            if not name.endswith(self.trains):
                parameter.requires_grad_(False)
        return model

    @property
    def _differ(self) -> bool:
        """True if ranks take other parts of a step; stages of a model all see the whole of it."""
        return bool(self.plan.layout.ranks) and not self.plan.layout.is_cut

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sequences of each micro-batch, of all ranks in order."""
        batches = [plan.batch for plan in self.plan.of_ranks()]
        return self.splits or tuple(b.micro_batch_size for b in batches for _ in range(b.accumulation_steps))

    def _make_uneven(self, model: nn.Module, *, step: int, rank: int) -> list[MicroBatch]:
        """The same sequences, whoever takes them."""
        batch = BatchPlan(micro_batch_size=1, accumulation_steps=self.workload.global_batch_size)
        workload = replace(self.workload, seed=self.workload.seed + step)
        singles = make_synthetic_batches(model, plan=replace(self.plan, batch=batch), workload=workload)
        if self.has_uneven_labels:
            for index, (_, labels, *_) in enumerate(singles):
                labels[:, : 1 + (5 * index + step) % 16] = IGNORED_LABEL
        own = self.plan.of_rank(rank).batch
        sizes = self.splits or (own.micro_batch_size,) * own.accumulation_steps
        waiting = iter(singles[self.plan.stretch_of(rank).start :])
        chosen = [[next(waiting) for _ in range(size)] for size in sizes]
        return [tuple(map(torch.cat, zip(*rows, strict=True))) for rows in chosen]

    def make_batches(self, model: nn.Module, *, step: int, rank: int = 0) -> list[MicroBatch]:
        """The micro-batches of a rank in one step."""
        if self.splits or self._differ:
            return self._make_uneven(model, step=step, rank=rank)
        num_mine = self.plan.batch.accumulation_steps
        batch = replace(self.plan.batch, accumulation_steps=num_mine * self.plan.layout.num_parts)
        workload = replace(self.workload, seed=self.workload.seed + step)
        batches = make_synthetic_batches(model, plan=replace(self.plan, batch=batch), workload=workload)
        if self.has_uneven_labels:
            for index, (_, labels, *_) in enumerate(batches):
                labels[:, : 1 + (5 * index + step) % 16] = IGNORED_LABEL
        first = 0 if self.plan.layout.sees_whole_batch else rank * num_mine
        return batches[first : first + num_mine]


def make_case(
    *,
    model: str = "decoder",
    num_ranks: int = 2,
    data: str = "replicated",
    replicas: int = 1,
    accumulation_steps: int = 1,
    gradients: str = "keep",
    activations: Sequence[str] = ("keep", "keep", "keep"),
    num_chunks: int = 1,
    state: OptimizerStatePlan | None = None,
    weights: WeightsPlan | None = None,
    has_uneven_labels: bool = False,
    trains: str = "",
    shares: Sequence[RankShare] = (),
    stage_blocks: Sequence[int] = (),
    schedule: str = "1f1b",
    num_rounds: int = 1,
    shares_blocks: bool = False,
    sync_every: int = 1,
    sync_format: str = "fp32",
    sync_rule: str = "nesterov",
    **workload: Any,
) -> RankCase:
    """shares: of ranks that differ. stage_blocks: of a model that is cut. num_rounds: stages on each rank.
    shares_blocks: whether ranks share each block.
    """
    batch = BatchPlan(micro_batch_size=2, accumulation_steps=accumulation_steps)
    values = {"sequence_length": 32, "num_steps": NUM_STEPS, "learning_rate": 1e-3, **workload}
    if gradients == "consume":
        values["max_grad_norm"] = None
    num_ranks = len(stage_blocks) // num_rounds or len(shares) or num_ranks
    num_parts = 1 if stage_blocks or shares_blocks else num_ranks
    return RankCase(
        model=model,
        plan=Plan(
            layout=DeviceLayout(
                num_devices=num_ranks,
                data=data,
                replicas=replicas,
                ranks=tuple(shares),
                stage_blocks=tuple(stage_blocks),
                schedule=schedule,
                tensor=num_ranks if shares_blocks else 1,
                sync_every=sync_every,
                sync_format=sync_format,
                sync_rule=sync_rule,
            ),
            batch=batch,
            weights=weights or WeightsPlan(),
            gradients=GradientsPlan(choice=gradients),
            optimizer_state=state or OptimizerStatePlan(),
            activations=ActivationsPlan(per_block=tuple(activations)),
            logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks),
        ),
        workload=TrainingWorkload(
            global_batch_size=_count_sequences(batch, () if stage_blocks else shares) or num_parts * batch.global_batch_size,
            **values,
        ),
        has_uneven_labels=has_uneven_labels,
        trains=trains,
    )


def _count_sequences(batch: BatchPlan, shares: Sequence[RankShare]) -> int:
    """The sequences of ranks that differ; 0 where there are none."""
    sizes = [(share.micro_batch_size or batch.micro_batch_size) for share in shares]
    steps = [(share.accumulation_steps or batch.accumulation_steps) for share in shares]
    return sum(size * count for size, count in zip(sizes, steps, strict=True))


def draw_cases(
    count: int, *, seed: int = SEED, num_ranks: Sequence[int] = (2, 4), has_adapters: bool = True
) -> list[RankCase]:
    """Cases of which each draws every decision by itself; draws that contradict themselves are passed over.

    has_adapters: False leaves them out, since a process that has none starts sooner.
    """
    draws = random.Random(seed)
    cases: list[RankCase] = []
    while len(cases) < count:
        case = _draw(draws, num_ranks)
        if case is not None and (has_adapters or case.workload.adapter is None):
            cases.append(case)
    return cases


def draw_replicas(count: int, *, seed: int = SEED, has_adapters: bool = True) -> list[RankCase]:
    """Cases of four ranks with two replicas of what they share, each drawn as ``draw_cases`` does."""
    cases = draw_cases(8 * count, seed=seed + 1, num_ranks=(4,), has_adapters=has_adapters)
    sharing = [
        case
        for case in cases
        if case.plan.layout.shares_state or case.plan.shares_homes(trains_all=case.workload.adapter is None)
    ]
    layouts = [replace(case.plan.layout, replicas=2) for case in sharing]
    found = [replace(case, plan=replace(case.plan, layout=layout)) for case, layout in zip(sharing, layouts, strict=True)]
    return found[:count]


def draw_cuts(count: int, *, seed: int = SEED, num_ranks: Sequence[int] = (2, 4)) -> list[RankCase]:
    """Cases of models that are cut, of which each draws every decision by itself; contradictions are passed over."""
    draws = random.Random(seed)
    cases: list[RankCase] = []
    while len(cases) < count:
        adapter = Adapter(rank=4) if draws.random() < 0.4 else None
        number = draws.choice(num_ranks)
        num_rounds = draws.choice([1, 1, 2, 3])
        cut = [draws.choice([1, 1, 2]) for _ in range(number * num_rounds)]
        dtype = draws.choice(["fp32", "fp32", "bf16", "fp16"])
        place = draws.choice(["device", "device", "host"])
        streams = draws.random() < 0.3
        if streams and adapter is None:
            # The state of weights that stream and are trained is wholly on the host.
            place = "host"
        with contextlib.suppress(HeadroomError):
            case = make_case(
                model="tied" if adapter and draws.random() < 0.5 else "untied",
                stage_blocks=cut,
                schedule=draws.choice(["1f1b", "1f1b", "gpipe"]) if num_rounds == 1 else "breadth_first",
                num_rounds=num_rounds,
                accumulation_steps=draws.choice([2, 3, 4, 6]),
                activations=[draws.choice(["keep", "recompute", "selective", "offload"]) for _ in range(sum(cut))],
                gradients="host" if place == "host" else draws.choice(["keep", "keep", "host"]),
                num_chunks=draws.choice([1, 1, 4]),
                state=OptimizerStatePlan(
                    bits=draws.choice([32, 32, 8]) if place == "device" else 32,
                    place=place,
                    fraction=draws.choice([1.0, 0.5]) if not streams or adapter else 1.0,
                ),
                weights=WeightsPlan(
                    dtype=dtype,
                    autocast=draws.choice(["off", "bf16"]) if dtype == "fp32" else "off",
                    place="host" if streams else "device",
                    prefetch=draws.choice([0, 1, 2]),
                    frozen=draws.choice(["same", "int8", "int4"]) if adapter else "same",
                ),
                has_uneven_labels=draws.random() < 0.5,
                optimizer=draws.choice(["adamw", "adamw", "lion", "sgd", "adafactor"]),
                adapter=adapter,
                max_grad_norm=draws.choice([0.5, None]),
            )
            case.plan.check(num_blocks=sum(cut), workload=case.workload)
            cases.append(case)
    return cases


def _draw(draws: random.Random, num_ranks: Sequence[int]) -> RankCase | None:
    model = draws.choice(_DRAWN)
    optimizer = draws.choice(["adamw", "adamw", "adamw", "lion", "sgd", "adafactor"])
    place = draws.choice(["device", "device", "host", "disk"])
    dtype = draws.choice(["fp32", "fp32", "bf16", "fp16"])
    # Blocks that share parameters can have no adapters.
    adapter = Adapter(rank=4) if draws.random() < 0.2 and model != "shared" else None
    streams = draws.random() < 0.3
    if streams and adapter is None and place == "device":
        # The state of weights that stream and are trained is wholly elsewhere.
        place = "host"
    num_blocks = MODELS[model]["num_hidden_layers"]
    try:
        weights = WeightsPlan(
            dtype=dtype,
            master=draws.choice(["fp32", "none"]) if dtype == "bf16" else "fp32",
            autocast=draws.choice(["off", "bf16"]) if dtype == "fp32" else "off",
            place="host" if streams else "device",
            prefetch=draws.choice([0, 1, 1, 2]),
            frozen=draws.choice(["same", "int8", "int4"]) if adapter else "same",
        )
        case = make_case(
            model=model,
            num_ranks=draws.choice(num_ranks),
            data=draws.choice(DATA_PARALLEL),
            accumulation_steps=draws.choice([1, 1, 2]),
            gradients=draws.choice(["keep", "keep", "host", "consume"]) if place == "device" else "host",
            activations=[draws.choice(["keep", "recompute", "selective", "offload"]) for _ in range(num_blocks)],
            num_chunks=draws.choice([1, 1, 4]),
            state=OptimizerStatePlan(
                bits=draws.choice([32, 32, 8]) if not streams or adapter else 32,
                place=place,
                fraction=draws.choice([1.0, 1.0, 0.5]) if not streams or adapter else 1.0,
            ),
            weights=weights,
            has_uneven_labels=draws.random() < 0.5,
            optimizer=optimizer,
            adapter=adapter,
            max_grad_norm=draws.choice([0.5, None]),
        )
        case.plan.check(num_blocks=num_blocks, workload=case.workload)
    except HeadroomError:
        return None
    return case
