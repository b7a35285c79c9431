"""Runs a few optimizer steps of a tiny model under a plan, and compares two such runs bit for bit."""

from dataclasses import dataclass
from pathlib import Path

import torch

from optimizer.models.build import build_model
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter, Peak
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.runtime.tiers.homes import HomeTensor
from tests.optimizer.runtime.tiny import make_spec, make_workload

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """State and measurements that some steps left behind."""

    results: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    validation_loss: float
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    peak: Peak
    """Peak of the last step."""
    copied_bytes: dict[str, int]
    """Bytes copied in the last step, by link."""
    disk_bytes: int


def make_trainer(
    name: str = "llama",
    *,
    plan: Plan,
    scratch: Path | None = None,
    updates_on_thread: bool | None = None,
    meter: Meter | None = None,
    model: torch.nn.Module | None = None,
    **workload: object,
) -> Trainer:
    model = build_model(make_spec(name), dtype=torch_dtype(plan.weights), seed=3) if model is None else model
    return Trainer(
        model,
        plan=plan,
        workload=make_workload(global_batch_size=plan.batch.global_batch_size, **workload),
        device=CPU,
        meter=Meter(device=CPU) if meter is None else meter,
        scratch=scratch,
        updates_on_thread=updates_on_thread,
    )


def run_steps(trainer: Trainer, *, num_steps: int = 3) -> Ran:
    """Steps of growing learning rate on the same tokens, then an evaluation. Leaves the trainer open."""
    torch.manual_seed(5)
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    results = []
    for index in range(num_steps):
        trainer.join()
        before_bytes = dict(trainer.tiers.copied_bytes)
        result = trainer.step(batches, learning_rate=1e-3 * (index + 1))
        results.append((result.loss, result.grad_norm))
    trainer.join()
    copied_bytes = {link: size - before_bytes[link] for link, size in trainer.tiers.copied_bytes.items()}
    peak = trainer.meter.peak()
    validation_loss = trainer.evaluate(batches)
    state, _ = trainer.optimizer.export_state()
    return Ran(
        results=results,
        validation_loss=validation_loss,
        weights={key: read(held) for key, held in trainer.named_weights().items()},
        state={key: read(held) for key, held in state.items()},
        peak=peak,
        copied_bytes={link: size for link, size in copied_bytes.items() if size},
        disk_bytes=trainer.tiers.disk_bytes,
    )


def read(held: torch.Tensor | HomeTensor) -> torch.Tensor:
    """A copy, in host memory."""
    return (held if isinstance(held, torch.Tensor) else held.load()).detach().cpu().clone()


def assert_same_bits(ran: Ran, expected: Ran) -> None:
    assert ran.results == expected.results
    assert ran.validation_loss == expected.validation_loss
    for found, wanted in ((ran.weights, expected.weights), (ran.state, expected.state)):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert torch.equal(found[key], wanted[key]), key
