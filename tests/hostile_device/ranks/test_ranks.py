"""Waits for what other ranks send, sum and take, on streams of their own as NCCL's are."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, Never, cast

import pytest
import torch

from optimizer.base.errors import RankLost
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.devices.layout import DataParallel, DeviceLayout
from optimizer.plan.devices.stages import list_stages
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import build_for_generation
from optimizer.runtime.generation.stages.generator import StagedGenerator
from optimizer.runtime.generation.stages.link import StageLink
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.ranks.pipeline.stage import PipelineStages
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.copies import as_bytes
from optimizer.workload import Adapter
from tests.hostile_device.backend import hostile_device
from tests.hostile_device.ranks.cases import (
    ALONE,
    CPU,
    CUTS,
    ON_HOST,
    SHARED,
    STAGED,
    Ran,
    assert_like,
    cut,
    generate_beside_another,
    run_beside_another,
)
from tests.hostile_device.ranks.collectives import TwinRanks
from tests.hostile_device.streams import Schedule
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.ranks.cases import RankCase
from tests.optimizer.runtime.states import read
from tests.optimizer.runtime.step.test_step import PLACES
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload


def run_case(case: RankCase, folder: Path, *, rank: int, schedule: Schedule) -> Ran:
    """The same as ``run_beside_another`` on the hostile device."""
    with hostile_device(schedule=schedule, seed=3) as backend:
        return run_beside_another(case, folder / schedule, rank=rank, backend=backend)


@pytest.mark.breadth
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CUTS.values(), ids=CUTS)
def test_hidden_states_and_gradients_of_other_stages_are_waited_for_and_kept_until_they_are_taken(
    tmp_path: Path, case: RankCase, rank: int
) -> None:
    late, early = (run_case(case, tmp_path, rank=rank, schedule=each) for each in ("late", "early"))
    assert late[2]
    assert_like(late, early)


def test_what_a_stage_has_offloaded_is_off_the_device_before_it_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held: list[tuple[int, int]] = []
    forward = PipelineStages._forward

    def look(stages: PipelineStages, *args: Any) -> torch.Tensor:
        root = forward(stages, *args)
        meter, trainer = stages._meter, cast(Trainer, cast(MethodType, stages._leaving).__self__)
        assert meter is not None
        found = meter.bytes_by_category()["activations"]
        trainer.tiers.settle()
        held.append((found, meter.bytes_by_category()["activations"]))
        return root

    monkeypatch.setattr(PipelineStages, "_forward", look)
    run_case(cut(activations=("offload",) * 3), tmp_path, rank=0, schedule="late")
    assert len(held) == 9
    assert all(found == rest for found, rest in held)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_alone_keeps_is_read_after_the_updates_under_way(tmp_path: Path, rank: int) -> None:
    case = cut(**{**ON_HOST, "weights": WeightsPlan()})

    def train(schedule: Schedule) -> dict[str, torch.Tensor]:
        folder = tmp_path / schedule
        with hostile_device(schedule=schedule) as backend, TwinRanks(backend, folder=folder, rank=rank) as ranks:
            model = case.make_model(rank=rank)
            trainer = Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=None, ranks=ranks)
            trainer.step(case.make_batches(model, step=0, rank=rank), learning_rate=1e-2)
            kept = {name: read(held) for name, held in trainer.dealt_weights().items()}
            trainer.close(keep_weights=False)
            return kept

    late, early = train("late"), train("early")
    assert late
    assert all(torch.equal(late[name], early[name]) for name in early)


def test_an_error_while_a_rank_runs_alone_leaves_no_weights_on_the_device(tmp_path: Path) -> None:
    case = cut(**ON_HOST)

    def fail(module: Any, args: Any) -> Never:
        raise OSError("no more")

    with hostile_device() as backend, TwinRanks(backend, folder=tmp_path) as ranks:
        model = case.make_model()
        trainer = Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=None, ranks=ranks)
        shapes = {name: parameter.shape for name, parameter in case.make_model().named_parameters()}
        handle = find_blocks(model)[0].register_forward_pre_hook(fail)
        with contextlib.suppress(OSError), trainer.running_alone(lambda name: torch.zeros(shapes[name])):
            model(torch.zeros((1, 4), dtype=torch.long))
        handle.remove()
        assert not trainer.weights._present
        trainer.close(keep_weights=False)


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE)
def test_weights_of_steps_alone_are_brought_together_as_updates_leave_them(tmp_path: Path, case: RankCase) -> None:
    def train(schedule: Schedule) -> Any:
        with hostile_device(schedule=schedule) as backend, TwinRanks(backend, folder=tmp_path / schedule) as ranks:
            model = case.make_model()
            trainer = Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=Meter(device=CPU), ranks=ranks)
            losses = []
            for step, is_in_step in enumerate((False, True, False)):
                losses.append(trainer.step(case.make_batches(model, step=step), learning_rate=1e-2).loss)
                assert trainer.is_in_step is is_in_step
            trainer.synchronize()
            assert trainer.is_in_step
            weights = {name: read(held) for name, held in trainer.named_weights().items()}
            trainer.close(keep_weights=False)
        return losses, weights, []

    assert_like(train("late"), train("early"))


@pytest.mark.breadth
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_sums_inside_of_blocks_that_ranks_share_are_waited_for(tmp_path: Path, case: RankCase, rank: int) -> None:
    late, early = (run_case(case, tmp_path, rank=rank, schedule=each) for each in ("late", "early"))
    assert_like(late, early)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_stage_of_a_generation_waits_for_hidden_states_and_until_its_own_are_taken(
    tmp_path: Path, name: str, rank: int
) -> None:
    spec = read_model_spec(SMALL_CONFIGS[name])

    def generate(schedule: Schedule) -> tuple[Any, list[torch.Tensor]]:
        with hostile_device(schedule=schedule) as backend:
            return generate_beside_another(spec, STAGED, tmp_path / schedule, rank=rank, backend=backend)

    late, early = generate("late"), generate("early")
    assert late[0] == early[0]
    assert len(late[1]) == len(early[1]) == (0 if rank else 8)
    assert all(torch.equal(mine, other) for mine, other in zip(late[1], early[1], strict=True))


def test_a_pass_that_is_stopped_ends_when_its_numbers_are_taken(tmp_path: Path) -> None:
    plan = GenerationPlan(batch_size=2, layout=GenerationLayout(stage_blocks=(1, 2)))
    stage = list_stages(plan.layout.stage_blocks)[0]
    with hostile_device() as backend, TwinRanks(backend, folder=tmp_path) as ranks:
        model = build_for_generation(
            read_model_spec(SMALL_CONFIGS["llama"]), weights=plan.weights, device=CPU, seed=3, stage=stage
        )
        staged = StagedGenerator(model, plan=plan, device=CPU, link=StageLink(ranks, stage), meter=Meter(device=CPU))
        assert staged.asks_to_stop(lambda: True)
        assert not ranks.numbers_on_their_way
        staged.close()


@pytest.mark.parametrize(
    ("data", "places", "replicas"),
    [
        ("replicated", "all on the device", 1),
        ("zero1", "state on the host", 1),
        ("zero2", "all on the device", 1),
        ("zero2", "all on the device", 2),
        ("zero1", "state on the host", 2),
    ],
)
def test_sums_and_weights_of_other_ranks_are_waited_for(
    tmp_path: Path, data: DataParallel, places: str, replicas: int
) -> None:
    layout = DeviceLayout(num_devices=2 * replicas, data=data, replicas=replicas)
    plan, num_ranks = replace(make_plan(**PLACES.get(places, {})), layout=layout), layout.num_devices

    def train(folder: Path, schedule: Schedule) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
        model = build_model(make_spec(), seed=3)
        workload = make_workload(global_batch_size=num_ranks * plan.batch.global_batch_size)
        with hostile_device(schedule=schedule) as backend, TwinRanks(backend, folder=folder, num_ranks=num_ranks) as ranks:
            trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=Meter(device=CPU), ranks=ranks)
            batches = make_synthetic_batches(model, plan=plan, workload=workload)
            results = [trainer.step(batches, learning_rate=1e-2) for _ in range(2)]
            weights = {name: read(held) for name, held in trainer.named_weights().items()}
            trainer.close()
        return [(result.loss, result.grad_norm) for result in results], weights

    (late, late_weights), (early, early_weights) = train(tmp_path / "late", "late"), train(tmp_path / "early", "early")
    assert late == early
    assert all(torch.equal(late_weights[name], early_weights[name]) for name in early_weights)


@pytest.mark.breadth
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("places", ["all on the device", "gradients consumed", "state on the host", "int4 under adapters"])
def test_weights_that_another_rank_keeps_are_there_before_they_are_used(tmp_path: Path, places: str, prefetch: int) -> None:
    """The other rank keeps them as they were at the start."""
    changes = {"gradients consumed": {"gradients": "consume"}, **PLACES}.get(places, {})
    frozen, adapter = ("int4", Adapter(rank=4)) if "adapters" in places else ("same", None)
    plan = make_plan("keep", "recompute", "offload", **changes)
    plan = replace(
        plan,
        layout=DeviceLayout(num_devices=2, data="zero3"),
        weights=replace(plan.weights, prefetch=prefetch, frozen=frozen),
    )

    def train(folder: Path, schedule: Schedule) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
        workload = make_workload(
            global_batch_size=2 * plan.batch.global_batch_size,
            adapter=adapter,
            max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
        )
        model = build_prepared(make_spec(), weights=plan.weights, workload=workload, device=CPU, layout=plan.layout)
        with hostile_device(schedule=schedule) as backend, TwinRanks(backend, folder=folder) as ranks:
            for block in find_blocks(model):
                # Adapters are on every device.
                for parameter in [each for each in block.parameters() if adapter is None or not each.requires_grad]:
                    ranks.kept[parameter.untyped_storage()._cdata] = as_bytes(parameter.data).clone()
            trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=Meter(device=CPU), ranks=ranks)
            assert any(map(trainer.weights.is_elsewhere, trainer.weights.dealt_names))
            batches = make_synthetic_batches(model, plan=plan, workload=workload)
            results = [trainer.step(batches, learning_rate=1e-2) for _ in range(2)]
            validation_loss = trainer.evaluate(batches)
            weights = {name: read(held) for name, held in trainer.held_weights().items()}
            trainer.close(keep_weights=False)
        return [(result.loss, result.grad_norm) for result in results] + [(validation_loss, 0.0)], weights

    (late, late_weights), (early, early_weights) = train(tmp_path / "late", "late"), train(tmp_path / "early", "early")
    assert late == early
    assert late_weights.keys() == early_weights.keys()
    assert all(torch.equal(late_weights[name], early_weights[name]) for name in early_weights)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_that_is_lost_while_weights_are_sent_is_named_in_that_step(tmp_path: Path, replicas: int) -> None:
    layout = DeviceLayout(num_devices=2 * replicas, data="zero1", replicas=replicas)
    plan, num_ranks = replace(make_plan(), layout=layout), layout.num_devices
    model, workload = build_model(make_spec(), seed=3), make_workload(global_batch_size=num_ranks * plan.batch.global_batch_size)
    with (
        hostile_device() as backend,
        TwinRanks(backend, folder=tmp_path, timeout_s=0.1, ends_broadcasts=False, num_ranks=num_ranks) as ranks,
    ):
        trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=None, ranks=ranks)
        batches = make_synthetic_batches(model, plan=plan, workload=workload)
        with pytest.raises(RankLost, match="weights of a step"):
            trainer.step(batches, learning_rate=1e-2)
        trainer.close(keep_weights=False)


@pytest.mark.parametrize("begin", ["all_reduce_", "broadcast_"])
def test_a_collective_that_ended_in_an_error_is_no_sum(tmp_path: Path, begin: str) -> None:
    with hostile_device() as backend, TwinRanks(backend, folder=tmp_path, fails=True) as ranks:
        collective: Callable[..., None] = getattr(ranks, begin)
        collective(torch.ones(8), **({} if begin == "all_reduce_" else {"owner": 1}))
        with pytest.raises(RankLost, match="the other rank has left"):
            ranks.settle()
