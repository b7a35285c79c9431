"""One rank of several, with a stage of a model, a part of its blocks, a replica or steps alone: what it comes to and sends.

The numbers are the same on the plain CPU device, on the hostile one and, but for their rounding, on a card.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.devices.stages import list_stages
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.device.backend import Backend
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.generation.generator import build_for_generation
from optimizer.runtime.generation.stages.generator import StagedGenerator
from optimizer.runtime.generation.stages.link import StageLink
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter
from tests.hostile_device.cases import Case
from tests.hostile_device.ranks.collectives import TwinRanks
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import prompts_of
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.states import read

CPU = torch.device("cpu")
Ran = tuple[list[Any], dict[str, torch.Tensor], list[torch.Tensor]]
"""Losses and norms of two steps, and an evaluation's loss; weights and state; what the other rank was sent."""


def assert_like(late: Any, early: Any) -> None:
    """Raise AssertionError where two runs have other numbers."""
    assert late[0] == early[0]
    assert late[1].keys() == early[1].keys()
    assert [name for name in late[1] if not torch.equal(late[1][name], early[1][name])] == []
    assert [index for index, pair in enumerate(zip(late[2], early[2], strict=True)) if not torch.equal(*pair)] == []


def run_beside_another(
    case: RankCase, folder: Path, *, rank: int, backend: Backend, are_at_once: bool = False
) -> Ran:
    """Two steps and an evaluation. are_at_once: as of ``TwinRanks``."""
    torch.manual_seed(5)
    device = backend.device
    with TwinRanks(backend, folder=folder, rank=rank, are_at_once=are_at_once, num_ranks=case.num_ranks) as ranks:
        model = case.make_model(rank=rank)
        if case.plan.weights.place == "device":
            model.to(device)
        trainer = Trainer(
            model, plan=case.plan, workload=case.workload, device=device, meter=Meter(device=device), scratch=folder, ranks=ranks
        )
        results = [trainer.step(case.make_batches(model, step=step, rank=rank), learning_rate=1e-3) for step in range(2)]
        assert not trainer.weights._present
        # Nothing that was sent is held beyond a step.
        assert trainer._pipeline is None or not (trainer._pipeline._link._hidden or trainer._pipeline._link._gradients)
        validation_loss = trainer.evaluate(case.make_batches(model, step=9, rank=rank))
        assert not trainer.weights._present
        held = trainer.held_weights() or trainer.named_weights()
        tensors = {name: read(each) for name, each in [*held.items(), *trainer.optimizer.export_state()[0].items()]}
        trainer.close(keep_weights=False)
        backend.synchronize()
        sent = [each.clone() for each in ranks.sent]
    return [*((result.loss, result.grad_norm) for result in results), validation_loss], tensors, sent


def generate_beside_another(
    spec: ModelSpec, plan: GenerationPlan, folder: Path, *, rank: int, backend: Backend, are_at_once: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    """The tokens of one stage's pass, and what the other was sent. are_at_once: as of ``TwinRanks``."""
    stage = list_stages(plan.layout.stage_blocks)[rank]
    device = backend.device
    with TwinRanks(backend, folder=folder, rank=rank, are_at_once=are_at_once) as ranks:
        model = build_for_generation(spec, weights=plan.weights, device=device, seed=3, stage=stage)
        staged = StagedGenerator(model, plan=plan, device=device, link=StageLink(ranks, stage), meter=Meter(device=device))
        tokens = staged.generate(prompts_of(9, plan.sequences_per_pass), num_new_tokens=4).tolist()
        assert not ranks.numbers_on_their_way
        staged.close()
        backend.synchronize()
        return tokens, [each.clone() for each in ranks.sent]


STAGED = GenerationPlan(batch_size=2, num_micro_batches=2, layout=GenerationLayout(stage_blocks=(1, 2)))


def cut(**changes: Any) -> RankCase:
    return make_case(**{"model": "untied", "stage_blocks": (1, 2), "accumulation_steps": 3, **changes})


ON_HOST = {
    "gradients": "host",
    "state": OptimizerStatePlan(place="host"),
    "weights": WeightsPlan(place="host", prefetch=1),
    "activations": ("offload", "recompute", "offload"),
}
CUTS = {
    "1f1b": cut(),
    "gpipe": cut(schedule="gpipe", activations=("offload", "keep", "recompute")),
    "parts on the host": cut(**ON_HOST),
    "frozen int4 that streams": cut(
        adapter=Adapter(rank=4), weights=WeightsPlan(frozen="int4", place="host", prefetch=1), activations=("offload",) * 3
    ),
    "rounds": cut(stage_blocks=(1, 1, 1, 1), num_rounds=2, schedule="breadth_first", activations=("keep",) * 4),
    "rounds on the host": cut(
        **{**ON_HOST, "activations": ("offload", "recompute", "offload", "keep")},
        stage_blocks=(1, 1, 1, 1), num_rounds=2, schedule="breadth_first",
    ),
}  # fmt: skip
SHARED = {
    "kept": make_case(shares_blocks=True, activations=("keep", "recompute", "selective"), accumulation_steps=2),
    "on the host": make_case(shares_blocks=True, **ON_HOST),
    "consumed": make_case(shares_blocks=True, gradients="consume", num_chunks=4),
    "adapters, biases": make_case(
        model="phi",
        shares_blocks=True,
        adapter=Adapter(rank=4),
        weights=WeightsPlan(place="host"),
        activations=("recompute",) * 3,
    ),
}
ALONE = {
    "on the device": make_case(sync_every=2),
    "on the host": make_case(sync_every=2, sync_format="int8", **ON_HOST),
    "masters on the host": make_case(
        sync_every=2, gradients="host", state=OptimizerStatePlan(place="host"), weights=WeightsPlan(dtype="bf16")
    ),
}


REPLICAS = {
    "on the device": make_case(data="zero2", num_ranks=4, replicas=2, accumulation_steps=2),
    "on the host": make_case(
        data="zero1", num_ranks=4, replicas=2, gradients="host", state=OptimizerStatePlan(place="host"), accumulation_steps=2
    ),
}


def list_rank_cases() -> list[Case]:
    """All of them on either rank, and stages of a generation."""
    named = {f"{kind}, {name}": case for kind, cases in _KINDS.items() for name, case in cases.items()}
    cases = [Case(f"{name}, rank {rank}", partial(_train, case, rank)) for name, case in named.items() for rank in range(2)]
    return [*cases, *(Case(f"stage of a generation, rank {rank}", partial(_generate, rank)) for rank in range(2))]


_KINDS = {"cut": CUTS, "shared": SHARED, "alone": ALONE, "replicas": REPLICAS}


def _train(case: RankCase, rank: int, scratch: Path) -> Any:
    numbers, tensors, sent = run_beside_another(case, scratch, rank=rank, backend=backend_of(CPU))
    return numbers, _hash([*tensors.values(), *sent])


def _generate(rank: int, scratch: Path) -> Any:
    spec = read_model_spec(SMALL_CONFIGS["qwen3"])
    tokens, sent = generate_beside_another(spec, STAGED, scratch, rank=rank, backend=backend_of(CPU))
    return tokens, _hash(sent)


def _hash(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
