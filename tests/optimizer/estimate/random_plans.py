"""Plans of every technique drawn at random, with workloads they suit and machines to price them on."""

from dataclasses import replace
from random import Random
from typing import Any

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

CHOICES = ("keep", "recompute", "selective", "offload", "offload_disk", "offload_remote")


def machines() -> tuple[Machine, Machine, Machine, Machine]:
    """The CPU device, one that says what fresh memory costs, and cards with fast and slow links."""
    cpu, card = make_cpu_machine(), table_machine("RTX 4090")
    slow = replace(
        card.rates,
        device_to_host_bytes_per_s=3e7,
        host_to_device_bytes_per_s=2e7,
        disk_write_bytes_per_s=1e7,
        disk_read_bytes_per_s=2e7,
        host_optimizer_elements_per_s=1e6,
    )
    return (
        cpu,
        replace(cpu, rates=replace(cpu.rates, fresh_bytes_per_s=3e9)),
        card,
        replace(card, rates=slow),
    )


def draw_cases(rng: Random, profile: Profile, num_cases: int) -> list[tuple[Plan, TrainingWorkload]]:
    """Plans with their workloads."""
    cases: list[Any] = []
    while len(cases) < num_cases:
        try:
            plan = draw_plan(rng, profile.num_blocks)
        except InvalidPlan:
            continue
        workload = TrainingWorkload(
            sequence_length=rng.choice([16, 24]),
            global_batch_size=plan.batch.global_batch_size,
            max_grad_norm=rng.choice([None, 1.0]),
            optimizer=rng.choice(["adamw", "adamw", "sgd"]),
            num_steps=rng.choice([1, 100]),
        )
        conflict = plan.find_conflict(
            workload,
            has_sparse_gradients=profile.has_sparse_gradients,
            has_plain_head=profile.has_plain_head,
            clamps_fp16=profile.clamps_fp16,
        )
        if conflict is None:
            cases.append((plan, workload))
    return cases


def draw_plan(rng: Random, num_blocks: int) -> Plan:
    streams = rng.random() < 0.3
    gradients = "host" if streams else rng.choice(["keep", "keep", "consume", "host"])
    leaves = gradients == "host" and (streams or rng.random() < 0.7)
    dtype = rng.choice(["fp32", "bf16", "fp16"])
    return Plan(
        batch=BatchPlan(micro_batch_size=rng.choice([1, 2]), accumulation_steps=rng.choice([1, 1, 2, 2, 4])),
        logits_and_loss=LogitsAndLossPlan(num_chunks=rng.choice([1, 1, 2, 3])),
        activations=ActivationsPlan(
            per_block=_draw_blocks(rng, num_blocks), compress=rng.choice(["none", "none", "bf16", "int8"])
        ),
        gradients=GradientsPlan(choice=gradients),
        optimizer_state=OptimizerStatePlan(
            bits=8 if not leaves and rng.random() < 0.3 else 32,
            place=rng.choice(["host", "disk", "remote"]) if leaves else "device",
            fraction=rng.choice([1.0, 0.5]) if leaves and not streams else 1.0,
        ),
        weights=WeightsPlan(
            dtype=dtype,
            autocast=rng.choice(["off", "bf16", "fp16"]) if dtype == "fp32" else "off",
            place=rng.choice(["host", "disk", "remote"]) if streams else "device",
            prefetch=rng.choice([0, 1, 2]) if streams else 1,
        ),
    )


def _draw_blocks(rng: Random, num_blocks: int) -> tuple[str, ...]:
    """All alike, two stretches, or any."""
    form = rng.random()
    if form < 0.2:
        return (rng.choice(CHOICES),) * num_blocks
    if form < 0.5:
        cut = rng.randint(0, num_blocks)
        return (rng.choice(CHOICES),) * cut + (rng.choice(CHOICES),) * (num_blocks - cut)
    return tuple(rng.choice(CHOICES) for _ in range(num_blocks))
