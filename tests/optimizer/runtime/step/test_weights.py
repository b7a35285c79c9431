import copy
import dataclasses
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import list_streamed
from optimizer.workload import Adapter
from tests.optimizer.runtime.states import CPU, assert_same_bits, make_trainer, run_steps
from tests.optimizer.runtime.tiny import CONFIGS, NUM_BLOCKS, make_plan, make_spec, make_workload
from tests.valkey import Valkey

ADAPTER = Adapter(rank=4)
PLACES = ("host", "disk", "remote")


def streaming_plan(*choices: Any, place: str = "host", prefetch: int = 1, **changes: Any) -> Plan:
    return make_plan(
        *choices,
        **{"gradients": "host", "state_place": "host", "weights_place": place, "prefetch": prefetch, **changes},
    )


def batches_of(trainer: Trainer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)


def bytes_of(block: Any) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in block.parameters())


def watch_presence(trainer: Trainer) -> list[Any]:
    """Record the blocks with bytes on the device as each runs forward and as its backward begins."""
    blocks = find_blocks(trainer.model)
    seen = []

    def look(index: int, phase: str) -> None:
        seen.append((phase, index, [number for number, block in enumerate(blocks) if bytes_of(block)]))

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda module, args, index=index: look(index, "forward"))
        block.register_forward_hook(
            lambda module, args, output, index=index: (output[0] if isinstance(output, tuple) else output).register_hook(
                lambda gradient: look(index, "backward")
            )
            and None
        )
    return seen


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, 1), (1, 2), (2, 3)])
def test_only_the_block_that_computes_and_those_ahead_are_on_the_device(prefetch: int, ahead: int) -> None:
    trainer = make_trainer(plan=streaming_plan(prefetch=prefetch))
    seen = watch_presence(trainer)
    trainer.step(batches_of(trainer), learning_rate=1e-3)
    last = NUM_BLOCKS - 1
    assert seen == [
        *(("forward", block, list(range(block, min(block + ahead, NUM_BLOCKS)))) for block in range(NUM_BLOCKS)),
        *(("backward", block, list(range(max(0, block - ahead + 1), block + 1))) for block in range(last, -1, -1)),
    ]
    assert not any(bytes_of(block) for block in find_blocks(trainer.model))
    trainer.close()


def test_evaluation_leaves_no_block_on_the_device() -> None:
    trainer = make_trainer(plan=streaming_plan())
    trainer.evaluate(batches_of(trainer))
    assert not any(bytes_of(block) for block in find_blocks(trainer.model))
    trainer.close()


def test_the_meter_counts_weights_as_they_come_and_go() -> None:
    plain = make_trainer(plan=make_plan())
    trainer = make_trainer(plan=streaming_plan(prefetch=0))
    block_bytes = [4 * sum(p.numel() for p in block.parameters()) for block in find_blocks(plain.model)]
    resident_bytes = plain.meter.bytes_by_category()["weights"] - sum(block_bytes)
    assert trainer.meter.bytes_by_category()["weights"] == resident_bytes
    counted = []
    for block in find_blocks(trainer.model):
        block.register_forward_pre_hook(
            lambda module, args: counted.append(trainer.meter.bytes_by_category()["weights"] - resident_bytes)
        )
    trainer.evaluate(batches_of(trainer))
    assert counted == block_bytes
    assert trainer.meter.bytes_by_category()["weights"] == resident_bytes
    trainer.close()
    plain.close()


@pytest.mark.parametrize("place", PLACES)
def test_closing_leaves_the_model_whole_with_its_trained_weights(tmp_path: Path, remote: Valkey, place: str) -> None:
    trainer = make_trainer(plan=streaming_plan(place=place), scratch=tmp_path)
    ran = run_steps(trainer)
    trainer.close()
    trainer.close()
    assert list(tmp_path.iterdir()) == []
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, ran.weights[name]), name
    ids = torch.zeros(1, 8, dtype=torch.long)
    assert trainer.model(ids).logits.isfinite().all()


def test_weights_are_replaced_wherever_they_live(tmp_path: Path) -> None:
    wanted = {name: torch.randn_like(p) for name, p in build_model(make_spec()).named_parameters()}
    losses = set()
    for plan in (make_plan(), streaming_plan(), streaming_plan(place="disk", state_place="disk")):
        trainer = make_trainer(plan=plan, scratch=tmp_path)
        trainer.set_weights(wanted)
        assert all(torch.equal(trainer.read_weight(name), weight) for name, weight in wanted.items())
        # The weights that the update starts from are replaced too.
        losses.add(tuple(trainer.step(batches_of(trainer), learning_rate=1e-3).loss for _ in range(2)))
        trainer.close()
    assert len(losses) == 1


def test_what_blocks_share_stays_on_the_device() -> None:
    model = build_model(make_spec())
    blocks: Any = find_blocks(model)
    first, second, _ = blocks
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    streamed = list_streamed(model, find_blocks(model), trains_all=True)
    assert [len(named) for named in streamed] == [8, 8, 9]
    assert not any("up_proj" in name for named in streamed[:2] for name in named)
    trainer = make_trainer(plan=streaming_plan(), model=copy.deepcopy(model))
    plain = make_trainer(plan=make_plan(), model=model)
    assert_same_bits(run_steps(trainer), run_steps(plain))
    assert trainer.model.get_parameter("model.layers.0.mlp.up_proj.weight").untyped_storage().nbytes() > 0
    trainer.close()
    plain.close()


def test_a_tied_head_stays_on_the_device() -> None:
    spec = read_model_spec({**CONFIGS["llama"], "tie_word_embeddings": True})
    trainer = make_trainer(plan=streaming_plan(), model=build_model(spec, seed=3))
    plain = make_trainer(plan=make_plan(), model=build_model(spec, seed=3))
    assert_same_bits(run_steps(trainer), run_steps(plain))
    trainer.close()
    plain.close()


@pytest.mark.breadth
@pytest.mark.parametrize("frozen", ["same", "int8", "int4", "nf4"])
@pytest.mark.parametrize("place", PLACES)
def test_frozen_weights_stream_under_adapters_and_adapters_stay(
    tmp_path: Path, remote: Valkey, frozen: str, place: str
) -> None:
    runs = []
    for weights in (WeightsPlan(frozen=frozen), WeightsPlan(frozen=frozen, place=place)):
        plan = dataclasses.replace(make_plan("recompute", "keep", "offload"), weights=weights)
        model = build_prepared(make_spec(), weights=weights, workload=make_workload(adapter=ADAPTER), device=CPU)
        trainer = make_trainer(plan=plan, model=model, adapter=ADAPTER, scratch=tmp_path)
        runs.append(run_steps(trainer))
        if weights.place != "device":
            on_device = {name for name, p in model.named_parameters() if p.untyped_storage().nbytes()}
            assert all("lora" in name or ".layers." not in name for name in on_device)
            assert all(name in on_device for name, p in model.named_parameters() if p.requires_grad)
        trainer.close()
    plain, streamed = runs
    assert_same_bits(streamed, plain)
    assert streamed.peak.device_bytes < plain.peak.device_bytes


def test_every_parameter_is_at_its_place_when_a_trainer_fails_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(make_spec(), seed=3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def refuse(*args: Any, **kwargs: Any) -> Never:
        raise RuntimeError("no more")

    monkeypatch.setattr("optimizer.runtime.step.step.HostGradients", refuse)
    with pytest.raises(RuntimeError, match="no more"):
        make_trainer(plan=streaming_plan(place="disk"), model=model, scratch=tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert not any(block._forward_pre_hooks for block in find_blocks(model))
