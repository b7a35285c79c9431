"""Plain modules: what is predicted of them is what the meter counts, to the byte."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidModel
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.models.plain import plain_anatomy
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.meta_ops.convolution import Convolution
from optimizer.profile.profile import Profile
from optimizer.profile.sizes import evaluate
from optimizer.profile.trace.module import profile_module
from optimizer.runtime.job.apply import apply
from optimizer.runtime.job.measure_stages import measure_stages
from optimizer.search.search import search_plans
from optimizer.workload import TrainingWorkload

MACHINE = make_cpu_machine()


class Mlp(nn.Module):
    """Blocks of one class between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(20, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.LayerNorm(48)) for _ in range(4)
        )
        self.after = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.after(hidden)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class VitBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Vit(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 17, width))
        self.layers = nn.Sequential(*(VitBlock(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.layers(hidden))[:, 0])


class Residual(nn.Module):
    """A block of ResNet v2: activations before convolutions."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(before, after, 1, stride=stride) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(hidden))) + self.skip(x)


class ConvNet(nn.Module):
    """Four blocks, of which the third halves the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList([Residual(8, 8), Residual(8, 8), Residual(8, 16, stride=2), Residual(16, 16)])
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean((2, 3)))


def regression(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    make: type
    inputs: torch.Tensor
    labels: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    blocks: tuple | None = None
    num_blocks: int


CASES = {
    "mlp": Case(make=Mlp, inputs=torch.randn(2, 20), labels=torch.randn(2, 10), loss=regression, num_blocks=4),
    "vit": Case(
        make=Vit,
        inputs=torch.randn(2, 3, 16, 16),
        labels=torch.zeros(2, dtype=torch.long),
        loss=F.cross_entropy,
        num_blocks=3,
    ),
    "convolutions": Case(
        make=ConvNet,
        inputs=torch.randn(2, 3, 16, 16),
        labels=torch.zeros(2, dtype=torch.long),
        loss=F.cross_entropy,
        blocks=("blocks",),
        num_blocks=4,
    ),
}
ON_HOST = {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}
PLANS: dict[str, Any] = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "selective": {"activations": "selective"},
    "offload": {"activations": "offload"},
    "accumulate": {"batch": BatchPlan(micro_batch_size=3, accumulation_steps=3)},
    "one at a time": {"batch": BatchPlan(micro_batch_size=1, accumulation_steps=2), "activations": "recompute"},
    "8 bits": {"optimizer_state": OptimizerStatePlan(bits=8)},
    "consume": {"gradients": GradientsPlan(choice="consume")},
    "streamed": {**ON_HOST, "weights": WeightsPlan(place="host")},
    "bf16": {"weights": WeightsPlan(dtype="bf16"), "activations": "recompute"},
    "autocast": {"weights": WeightsPlan(autocast="bf16")},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=CASES)
def profiled(request: pytest.FixtureRequest) -> tuple[Case, Profile]:
    case = CASES[request.param]
    found = profile_module(case.make, inputs=case.inputs, labels=case.labels, loss=case.loss, blocks=case.blocks)
    return case, found


def make_plan(name: str, num_blocks: int) -> Plan:
    columns = {"batch": BatchPlan(micro_batch_size=6, accumulation_steps=1), **PLANS[name]}
    choice = columns.get("activations", "keep")
    return Plan(**columns | {"activations": ActivationsPlan(per_block=(choice,) * num_blocks)})


def make_workload(plan: Plan) -> TrainingWorkload:
    return TrainingWorkload(
        global_batch_size=plan.batch.global_batch_size,
        max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
        eval_batches=2,
    )


def make_batches(case: Case, plan: Plan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = plan.batch.micro_batch_size
    return [
        (
            torch.zeros((size, *case.inputs.shape[1:]), dtype=case.inputs.dtype),
            torch.zeros((size, *case.labels.shape[1:]), dtype=case.labels.dtype),
        )
        for _ in range(plan.batch.accumulation_steps)
    ]


def test_convolutions_are_known_at_any_micro_batch(profiled: tuple[Case, Profile]) -> None:
    case, profile = profiled
    noted = [Convolution(*(evaluate(size, (7, 1)) for size in op.convolution)) for op in profile.ops if op.convolution]
    assert bool(noted) == any(isinstance(module, nn.Conv2d) for module in case.make().modules())
    # Micro-batches of one have ops of their own.
    assert {convolution.batch for convolution in noted} <= {1, 7}


@pytest.mark.breadth
@pytest.mark.parametrize("name", PLANS)
def test_every_stage_takes_the_bytes_predicted(profiled: tuple[Case, Profile], tmp_path: Path, name: str) -> None:
    case, profile = profiled
    assert profile.num_blocks == case.num_blocks
    plan = make_plan(name, case.num_blocks)
    workload = make_workload(plan)
    torch.manual_seed(0)
    module = case.make().to(torch.bfloat16 if plan.weights.dtype == "bf16" else torch.float32)
    measured = measure_stages(
        module,
        plan=plan,
        workload=workload,
        scratch=tmp_path,
        anatomy=plain_anatomy(module, loss=case.loss, blocks=case.blocks),
        make_batches=lambda model, *, plan, workload: make_batches(case, plan),
    )
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=MACHINE)
    for peak in predicted.peaks:
        counted = getattr(measured, peak.stage)
        assert peak.device_bytes_by_category == counted.device_bytes_by_category, peak.stage
        assert peak.device_peak_bytes == counted.device_bytes, peak.stage
    assert predicted.host_peak_bytes == measured.steady_step.host_bytes


class PostActivation(nn.Module):
    """Blocks that end with ReLU, which keeps what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DataDependent(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x[:, 0] > 0])


class ReadsValues(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Contrastive(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        return (hidden @ hidden.T).logsumexp(1)


def profile_as_mlp(make: nn.Module | type[nn.Module], **changes: Any) -> Profile:
    given = {"inputs": torch.randn(2, 20), "labels": torch.randn(2, 10), "loss": regression, **changes}
    return profile_module(make, **given)


def test_blocks_that_keep_what_they_return_are_predicted_to_the_byte_in_mixtures_and_as_one_block() -> None:
    example = {"inputs": torch.randn(2, 24), "labels": torch.randn(2, 24), "loss": regression}
    for blocks, mixtures in (
        (None, (("keep", "recompute", "offload"), ("offload", "keep", "recompute"), ("recompute", "offload", "keep"))),
        ((), (("keep",), ("recompute",), ("offload",))),
    ):
        profile = profile_module(PostActivation, **example, blocks=blocks)
        assert profile.num_blocks == len(mixtures[0])
        case = Case(make=PostActivation, blocks=blocks, num_blocks=profile.num_blocks, **example)
        for per_block in mixtures:
            plan = make_plan("keep", profile.num_blocks)
            plan = dataclasses.replace(plan, activations=dataclasses.replace(plan.activations, per_block=per_block))
            workload = make_workload(plan)
            module = PostActivation()
            measured = measure_stages(
                module,
                plan=plan,
                workload=workload,
                anatomy=plain_anatomy(module, loss=regression, blocks=blocks),
                make_batches=lambda model, *, plan, workload, case=case: make_batches(case, plan),
            )
            predicted = estimate_training(profile, plan=plan, workload=workload, machine=MACHINE)
            assert predicted.device_peak_bytes == measured.steady_step.device_bytes, per_block


class Bag(nn.Module):
    """A bag of words: the embedding keeps the token ids that it is given for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor | None:
        return self.head(self.words(ids)).mean(1)


def test_one_block_that_is_given_token_ids_takes_the_bytes_predicted() -> None:
    example = {"inputs": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}
    profile = profile_module(Bag, **example, loss=F.cross_entropy, blocks=())
    case = Case(make=Bag, loss=F.cross_entropy, blocks=(), num_blocks=1, **example)
    for name in ("keep", "recompute", "offload"):
        plan = make_plan(name, 1)
        workload = make_workload(plan)
        module = Bag()
        measured = measure_stages(
            module,
            plan=plan,
            workload=workload,
            anatomy=plain_anatomy(module, loss=F.cross_entropy, blocks=()),
            make_batches=lambda model, *, plan, workload: make_batches(case, plan),
        )
        predicted = estimate_training(profile, plan=plan, workload=workload, machine=MACHINE)
        assert predicted.device_peak_bytes == measured.steady_step.device_bytes, name
        assert predicted.host_peak_bytes == measured.steady_step.host_bytes, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (DataDependent, "the module cannot be traced at a micro-batch of 1: "),
        (ReadsValues, r"the model cannot be traced: it decides by the values of its activations \(Tensor.item\)"),
        (Contrastive, "is no polynomial in micro-batch and sequence"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(make: type[nn.Module], message: str) -> None:
    changes = {"labels": torch.randn(2)} if make is Contrastive else {}
    with pytest.raises(InvalidModel, match=message):
        profile_as_mlp(make, **changes)


def test_names_that_the_module_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidModel, match="blocks name 'layers', which the module does not have; its children: before"):
        profile_as_mlp(Mlp, blocks=("layers",))


def test_frozen_parameters_are_refused_by_name() -> None:
    module = Mlp()
    module.before.weight.requires_grad_(False)
    with pytest.raises(InvalidModel, match=r"the module's parameter before.weight is frozen"):
        profile_as_mlp(module)


def test_a_module_that_is_given_is_left_as_it_is_and_profiles_as_one_that_is_made() -> None:
    module = Mlp()
    before = [parameter.clone() for parameter in module.parameters()]
    assert profile_as_mlp(module) == profile_as_mlp(Mlp)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_plan_is_carried_out_in_a_loop_of_ones_own_to_the_bits_of_plain_training() -> None:
    case = CASES["mlp"]
    weights = []
    for name in ("keep", "offload"):
        torch.manual_seed(1)
        module = Mlp()
        plan = make_plan(name, 4)
        anatomy = plain_anatomy(module, loss=case.loss)
        with apply(module, plan, workload=make_workload(plan), budget_bytes=2**30, anatomy=anatomy) as run:
            for _ in range(2):
                for inputs, labels in make_batches(case, plan):
                    run.compute_loss(inputs + 1, labels).backward()
                run.step(0.01)
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_several_inputs_are_given_as_a_tuple() -> None:
    class Two(Mlp):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    inputs = (torch.randn(2, 20), torch.randn(2, 1))
    profile = profile_as_mlp(Two, inputs=inputs)
    assert profile.input_bytes == 4 * (20 + 1 + 10)
    assert Profile.from_json(profile.to_json()) == profile


def test_the_search_finds_a_plan_that_takes_what_it_says(tmp_path: Path) -> None:
    case = CASES["mlp"]
    profile = profile_as_mlp(case.make)
    workload = TrainingWorkload(global_batch_size=64, eval_batches=1)
    plain = estimate_training(profile, plan=make_plan_of(64), workload=workload, machine=MACHINE).device_peak_bytes
    goal = Goal(device_budget_bytes=int(0.6 * plain))
    plan = search_plans(profile, workload=workload, goal=goal, machine=MACHINE).chosen.plan
    module = case.make()
    measured = measure_stages(
        module,
        plan=plan,
        workload=workload,
        scratch=tmp_path,
        anatomy=plain_anatomy(module, loss=case.loss),
        make_batches=lambda model, *, plan, workload: make_batches(case, plan),
    )
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=MACHINE)
    assert predicted.device_peak_bytes == measured.steady_step.device_bytes <= goal.device_budget_bytes
    assert plan.logits_and_loss.num_chunks == 1


def make_plan_of(micro_batch_size: int) -> Plan:
    batch = BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=1)
    return Plan(batch=batch, activations=ActivationsPlan(per_block=("keep",) * 4))
