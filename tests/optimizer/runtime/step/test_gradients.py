from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from optimizer.base.categories import CATEGORIES
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.gradients import Gradients, HostGradients
from optimizer.runtime.tiers.background_thread import BackgroundThread
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.states import CPU, make_trainer
from tests.optimizer.runtime.tiny import make_plan


def make_named(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(8, 4, dtype=dtype)),
        "vector": torch.nn.Parameter(torch.randn(4, dtype=dtype)),
        "spare": torch.nn.Parameter(torch.randn(2, dtype=dtype)),
    }


def compute_loss(
    named: dict[str, torch.nn.Parameter], hidden: torch.Tensor, *, uses_spare: bool = False
) -> torch.Tensor:
    loss = (hidden @ named["matrix"] * named["vector"]).square().sum()
    return loss + named["spare"].sum() if uses_spare else loss


@pytest.fixture(params=[False, True], ids=["at once", "on a thread"])
def make_on_host(request: pytest.FixtureRequest) -> Iterator[Callable[..., HostGradients]]:
    workers = []

    def make(
        named: dict[str, torch.nn.Parameter], *, meter: Meter | None = None, accumulates: bool = True
    ) -> HostGradients:
        workers.append(BackgroundThread(name="test", device=CPU, is_threaded=request.param))
        return HostGradients(
            named,
            tiers=Tiers(device=CPU, meter=meter),
            worker=workers[-1],
            accumulates=accumulates,
        )

    yield make
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, None])
def test_sums_on_the_host_are_those_of_the_device(
    make_on_host: Callable[..., HostGradients], dtype: torch.dtype, max_norm: float | None
) -> None:
    kept, moved = make_named(dtype), make_named(dtype)
    on_host = make_on_host(moved)
    handles = on_host.watch()
    for index in range(3):
        hidden = torch.randn(5, 8, dtype=dtype)
        compute_loss(kept, hidden).backward()
        on_host.begin_micro_batch(is_last=index == 2)
        compute_loss(moved, hidden).backward()
        assert all(parameter.grad is None for parameter in moved.values())
    expected = Gradients(list(kept.values())).clip_(max_norm)
    clipped = on_host.clip_(max_norm)
    assert torch.equal(clipped.norm, expected.norm)
    assert on_host.arrived() == {"matrix", "vector"}
    for name in ("matrix", "vector"):
        with on_host.on_device(name, clipped.factor) as left:
            assert left is None
            assert torch.equal(moved[name].grad, kept[name].grad)
        assert moved[name].grad is None
    for handle in handles:
        handle.remove()


def test_a_gradient_of_an_earlier_micro_batch_alone_counts(make_on_host: Callable[..., HostGradients]) -> None:
    kept, moved = make_named(), make_named()
    on_host = make_on_host(moved)
    on_host.watch()
    hidden = torch.randn(5, 8)
    for index in range(2):
        compute_loss(kept, hidden, uses_spare=index == 0).backward()
        on_host.begin_micro_batch(is_last=index == 1)
        compute_loss(moved, hidden, uses_spare=index == 0).backward()
    assert torch.equal(on_host.clip_(None).norm, Gradients(list(kept.values())).clip_(None).norm)
    assert on_host.arrived() == set(moved)


def test_a_step_begins_from_nothing(make_on_host: Callable[..., HostGradients]) -> None:
    named = make_named()
    on_host = make_on_host(named)
    on_host.watch()
    norms = []
    for _ in range(2):
        on_host.begin_micro_batch(is_last=True)
        compute_loss(named, torch.ones(5, 8)).backward()
        norms.append(on_host.clip_(None).norm)
        on_host.clear()
    assert torch.equal(*norms)
    assert on_host.arrived() == set()


def test_fp16_gradients_are_scaled_once_they_are_wide(make_on_host: Callable[..., HostGradients]) -> None:
    named = make_named(torch.float16)
    on_host = make_on_host(named)
    on_host.watch()
    on_host.begin_micro_batch(is_last=True)
    compute_loss(named, torch.ones(5, 8, dtype=torch.float16)).backward()
    before = on_host.on_the_host("matrix").clone()
    factor = on_host.clip_(1.0, loss_scale=1024.0).factor
    with on_host.on_device("matrix", factor) as left:
        assert left is factor
        assert torch.equal(named["matrix"].grad, before)


def test_its_memory_on_the_host_is_allocated_once(make_on_host: Callable[..., HostGradients]) -> None:
    named = make_named()
    meter = Meter(device=CPU)
    on_host = make_on_host(named, meter=meter)
    on_host.watch()
    num_staging = on_host._staging.qsize()
    gradients_bytes = sum(parameter.nbytes for parameter in named.values())
    taken_bytes = gradients_bytes + num_staging * named["matrix"].nbytes + 4 * len(named)
    assert meter.bytes_by_category(tier="host")["gradients"] == meter.host_bytes == taken_bytes
    for _ in range(3):
        on_host.begin_micro_batch(is_last=True)
        compute_loss(named, torch.ones(5, 8)).backward()
    on_host.clip_(1.0)
    assert meter.bytes_by_category(tier="host")["gradients"] == taken_bytes


def test_an_error_while_adding_reaches_whoever_clips_and_stops_nobody_before() -> None:
    named = make_named()
    worker = BackgroundThread(name="test", device=CPU, is_threaded=True)
    on_host = HostGradients(named, tiers=Tiers(device=CPU), worker=worker, accumulates=True)
    on_host.watch()
    compute_loss(named, torch.ones(5, 8)).backward()
    on_host._buffers["vector"] = torch.zeros(3)
    # More than there is staging for.
    for _ in range(4):
        compute_loss(named, torch.ones(5, 8)).backward()
    with pytest.raises(RuntimeError, match="must match the size"):
        on_host.clip_(None)
    worker.close()


def test_gradients_on_the_host_never_stand_together_on_the_device(tmp_path: Path) -> None:
    trainer = make_trainer(plan=make_plan(gradients="host", accumulation_steps=2))
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    trainer.step(batches, learning_rate=1e-3)
    trainer.meter.start_timeline()
    trainer.step(batches, learning_rate=1e-3)
    slot, level, highest = CATEGORIES.index("gradients"), 0, 0
    for _, category, change in trainer.meter.take_events():
        if category == slot:
            level += change
            highest = max(highest, level)
    assert highest == max(parameter.nbytes for parameter in trainer.model.parameters())
    assert level == 0
    trainer.close()


def test_a_step_that_overflowed_leaves_nothing_behind_for_the_next() -> None:
    losses = []
    for places in ({}, {"gradients": "host", "state_place": "host", "weights_place": "host"}):
        trainer = make_trainer(plan=make_plan(dtype="fp16", **places))
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        parameter = trainer.model.get_parameter("model.layers.1.mlp.down_proj.weight")
        results = []
        for spoiled in (False, True, False, False):
            handle = parameter.register_hook(lambda gradient: gradient * float("inf")) if spoiled else None
            results.append(trainer.step(batches, learning_rate=1e-3))
            if handle is not None:
                handle.remove()
        assert [result.is_left_out for result in results] == [False, True, False, False]
        losses.append([result.loss for result in results])
        trainer.close()
    assert losses[0] == losses[1]
