"""Ranks that take steps alone and are brought together, against DiLoCo written out with plain models and torch's optimizers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optimizer.base.errors import InvalidPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of, read_weights
from tests.optimizer.runtime.ranks.rank_process import CPU, LEARNING_RATE

EPSILON = 1e-3
"""So large that AdamW does not go by the sign of a gradient that is nearly 0, which rounding may turn."""
Send = Callable[[list[torch.Tensor]], torch.Tensor]
"""Gives the mean of the ranks' differences, each times its share already, as they arrive."""


def send_fp32(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


def send_bf16(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.to(torch.bfloat16) for part in parts]).sum(0).to(torch.float32)


def send_int8(parts: list[torch.Tensor]) -> torch.Tensor:
    """In blocks of 256 whose scale is the largest number of all ranks; the whole numbers of all ranks fit 8 bits together."""
    flat = F.pad(torch.stack([part.reshape(-1) for part in parts]), (0, -parts[0].numel() % 256))
    blocks = flat.view(len(parts), -1, 256)
    scale = blocks.abs().amax((0, 2))[:, None] / (127 // len(parts))
    whole = torch.where(scale > 0, (blocks / scale).round(), 0.0)
    return (whole.sum(0) * scale).view(-1)[: parts[0].numel()].view(parts[0].shape)


SENDS: dict[str, Send] = {"fp32": send_fp32, "bf16": send_bf16, "int8": send_int8}


class Outer:
    """Nesterov's momentum on flat common weights, by torch."""

    def __init__(self, common: torch.Tensor, *, send: Send, rule: str) -> None:
        self.common = nn.Parameter(common.clone())
        self._send = send
        self._optimizer = torch.optim.SGD([self.common], lr=0.7, momentum=0.9, nesterov=True)
        if rule == "average":
            self._optimizer = torch.optim.SGD([self.common], lr=1.0)

    def step(
        self, found: Sequence[torch.Tensor], shares: Sequence[float], *, as_weights: Callable[..., Any] = lambda x: x
    ) -> None:
        start = as_weights(self.common.detach())
        self.common.grad = self._send([(start - own) * share for own, share in zip(found, shares, strict=True)])
        self._optimizer.step()


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters() if parameter.requires_grad])


def fill(model: nn.Module, flat: torch.Tensor) -> None:
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(flat[start : start + parameter.numel()].view(parameter.shape))
                start += parameter.numel()


def train_plainly(case: RankCase, *, num_steps: int) -> dict[str, torch.Tensor]:
    """Algorithm 1 of the paper for fp32 models under AdamW, without anything of the library but models and batches."""
    layout, workload = case.plan.layout, case.workload
    models = []
    for _ in range(case.num_ranks):
        torch.manual_seed(5)
        models.append(case.make_model().train())
    outer = Outer(flatten(models[0]), send=SENDS[layout.sync_format], rule=layout.sync_rule)
    inner = [
        torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": workload.weight_decay},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(workload.beta1, workload.beta2),
            eps=workload.epsilon,
        )
        for model in models
    ]
    samples = [plan.batch.global_batch_size for plan in case.plan.of_ranks()]
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            batches = case.make_batches(model, step=step, rank=rank)
            num_labels = sum(int((labels != -100).sum()) for _, labels, *_ in batches)
            for ids, labels, *_ in batches:
                logits = model(ids).logits.flatten(0, 1)
                (F.cross_entropy(logits, labels.flatten()) * (int((labels != -100).sum()) / num_labels)).backward()
            if workload.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (step + 1)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % layout.sync_every == 0:
            outer.step([flatten(model) for model in models], [number / sum(samples) for number in samples])
            for model in models:
                fill(model, outer.common.detach())
    return {name: parameter.detach() for name, parameter in models[0].named_parameters()}


def read(held: Any) -> torch.Tensor:
    tensor: torch.Tensor = held if isinstance(held, torch.Tensor) else held.load()
    return tensor


def train_with_one_device_each(case: RankCase, folder: Path, *, num_steps: int) -> dict[str, torch.Tensor]:
    """The same with the library's own steps of one device inside, for plans that plain torch does not carry out."""
    layout, dtype = case.plan.layout, case.plan.weights.dtype
    trainers = []
    for rank in range(case.num_ranks):
        torch.manual_seed(5)
        own = replace(case.plan.of_rank(rank), layout=DeviceLayout())
        workload = replace(case.workload, global_batch_size=own.batch.global_batch_size)
        trainers.append(Trainer(case.make_model(), plan=own, workload=workload, device=CPU, meter=None, scratch=folder))
    is_finer = case.plan.weights.master_bytes_per_element > 0
    first = {name: read(held).clone() for name, held in trainers[0]._read_updated().items()}
    common = torch.cat([value.reshape(-1).float() for value in first.values()])
    outer = Outer(common, send=SENDS[layout.sync_format], rule=layout.sync_rule)
    as_weights = (lambda x: x) if is_finer or dtype == "fp32" else (lambda x: x.to(torch.bfloat16).float())
    samples = [plan.batch.global_batch_size for plan in case.plan.of_ranks()]
    for step in range(num_steps):
        for rank, trainer in enumerate(trainers):
            trainer.step(case.make_batches(trainer.model, step=step, rank=rank), learning_rate=LEARNING_RATE * (step + 1))
        if (step + 1) % layout.sync_every == 0:
            held = [trainer._read_updated().values() for trainer in trainers]
            flat = [torch.cat([read(each).reshape(-1).float() for each in one]) for one in held]
            outer.step(flat, [number / sum(samples) for number in samples], as_weights=as_weights)
            parts = outer.common.detach().split([value.numel() for value in first.values()])
            values = {name: part.view(first[name].shape) for name, part in zip(first, parts, strict=True)}
            for trainer in trainers:
                trainer._write_updated(values)
    found = {name: read(each).clone() for name, each in trainers[0].named_weights().items()}
    for trainer in trainers:
        trainer.close(keep_weights=False)
    return found


def assert_same_weights(found: dict[str, Any], expected: dict[str, torch.Tensor], *, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("sync_format", "rule"), [("fp32", "nesterov"), ("fp32", "average"), ("bf16", "nesterov"), ("int8", "nesterov")]
)
def test_ranks_train_as_the_papers_have_it(carry_out: CarryOut, sync_format: str, rule: str) -> None:
    case = make_case(
        model="llama",
        sync_every=2,
        sync_format=sync_format,
        sync_rule=rule,
        accumulation_steps=2,
        has_uneven_labels=True,
        epsilon=EPSILON,
    )
    replies, folder = carry_out(case, num_steps=6)
    answers = answers_of(replies)
    assert answers[0]["weights_sha256"] == answers[1]["weights_sha256"]
    assert answers[0]["losses"] != answers[1]["losses"]
    found, expected = read_weights(folder), train_plainly(case, num_steps=6)
    if sync_format == "fp32":
        assert_same_weights(found, expected, tolerance=1e-6)
        return
    # A difference at the border of two numbers that can be sent goes to one here and to the other there: hardly any, and by no
    # more than their distance.
    off = torch.cat([(found[name] - weight).abs().view(-1) for name, weight in expected.items()])
    assert float((off > 1e-6).double().mean()) < 1e-3
    assert float(off.max()) < 3e-5


def test_a_rank_that_takes_more_of_a_step_counts_for_more(carry_out: CarryOut) -> None:
    shares = (RankShare(micro_batch_size=3), RankShare(micro_batch_size=1, accumulation_steps=2))
    case = make_case(model="llama", sync_every=2, shares=shares, epsilon=EPSILON)
    replies, folder = carry_out(case, num_steps=4)
    assert len({answer["weights_sha256"] for answer in answers_of(replies)}) == 1
    assert_same_weights(read_weights(folder), train_plainly(case, num_steps=4), tolerance=1e-6)


def test_ranks_go_their_own_ways_between_synchronizations(carry_out: CarryOut) -> None:
    replies, _ = carry_out(make_case(sync_every=2), num_steps=3)
    first, second = answers_of(replies)
    assert first["weights_sha256"] != second["weights_sha256"]
    assert first["validation_loss"] == second["validation_loss"]


def test_the_same_run_ends_with_the_same_bits(carry_out: CarryOut) -> None:
    case = make_case(sync_every=2, sync_format="int8", num_ranks=3)
    found = [answers_of(carry_out(case, num_steps=4)[0])[0] for _ in range(2)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


ON_HOST: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        make_case(sync_every=2, weights=WeightsPlan(dtype="bf16")),
        make_case(sync_every=2, weights=WeightsPlan(dtype="bf16"), sync_rule="average", sync_format="int8"),
        make_case(sync_every=2, weights=WeightsPlan(dtype="bf16", master="none"), sync_format="bf16"),
        make_case(sync_every=2, adapter=Adapter(rank=4), weights=WeightsPlan(frozen="int8", place="host"), sync_format="int8"),
        make_case(sync_every=2, gradients="consume", activations=("recompute", "selective", "offload")),
        make_case(sync_every=2, **ON_HOST, accumulation_steps=2, sync_format="int8"),
        make_case(sync_every=2, **ON_HOST, weights=WeightsPlan(dtype="bf16", place="host")),
        make_case(sync_every=2, **ON_HOST, weights=WeightsPlan(place="host")),
        make_case(sync_every=2, state=OptimizerStatePlan(bits=8), num_chunks=4),
        make_case(sync_every=2, optimizer="adafactor", model="tied"),
        make_case(sync_every=2, objective="orpo", packing="off", loss_on="assistant"),
    ],
    ids=lambda case: case.name,
)
def test_every_way_of_saving_memory_is_brought_together(carry_out: CarryOut, tmp_path: Path, case: RankCase) -> None:
    replies, folder = carry_out(case, num_steps=4)
    assert len({answer["weights_sha256"] for answer in answers_of(replies)}) == 1
    expected = train_with_one_device_each(case, tmp_path, num_steps=4)
    # In bf16 a common weight between two that can be written goes to one here and to the other there.
    assert_same_weights(read_weights(folder), expected, tolerance=1e-6 if case.plan.weights.dtype == "fp32" else 4e-3)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"weights": WeightsPlan(dtype="fp16")}, "is fp16, which scales the loss"),
        ({"gradients": "host", "state": OptimizerStatePlan(place="disk")}, "optimizer state place is disk, which is read whole"),
    ],
    ids=["fp16", "disk"],
)
def test_what_steps_alone_do_not_go_with_is_refused_in_words(more: dict[str, Any], words: str) -> None:
    case = make_case(sync_every=2, **more)
    with pytest.raises(InvalidPlan, match=words):
        case.plan.check(num_blocks=3, workload=case.workload)
