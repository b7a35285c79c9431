"""Rows for the tests of pages: made by the program's own actions wherever it has one, with sizes as a small model has them."""

import math
import time
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.estimate.prediction import Prediction, TimelinePoint
from optimizer.hardware.machine import Device, Machine, Rates
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.serialize import to_json
from optimizer.units import GIB, MIB
from optimizer.workload import Goal, TrainingWorkload
from webapp.catalog.models import Dataset, Model
from webapp.catalog.models import Machine as MachineRow
from webapp.jobs.actions import claim_job, create_job, record_phase, record_started
from webapp.jobs.models import Attempt, Job

NUM_STEPS = 120
BUDGET_BYTES = 480 * MIB
BLOCKS = ("recompute",) * 6 + ("offload",) * 4 + ("keep",) * 2
PEAK = {
    "weights": 44 * MIB,
    "gradients": 44 * MIB,
    "optimizer_state": 88 * MIB,
    "activations": 176 * MIB,
    "logits_and_loss": 48 * MIB,
    "temporaries": 9 * MIB,
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def make_user(name: str = "ada", *, is_admin: bool = False) -> User:
    make = User.objects.create_superuser if is_admin else User.objects.create_user
    return make(username=name, password="correct horse battery")


def make_machine(name: str = "workbench") -> MachineRow:
    rates = Rates(
        matmul_flops_per_s={"fp32": 9e10, "bf16": 4e10},
        attention_flops_per_s={"fp32": 3e10, "bf16": 2e10},
        memory_bytes_per_s=1.2e10,
        op_overhead_s=4e-6,
        device_to_host_bytes_per_s=6e9,
        host_to_device_bytes_per_s=6.5e9,
        optimizer_elements_per_s={"adamw_32": 3e8, "adamw_8": 1e8},
        source="measured",
    )
    device = Device(kind="cpu", name="two cores", memory_bytes=8 * GIB)
    machine = Machine(name=name, device=device, host_memory_bytes=16 * GIB, rates=rates, num_threads=2)
    return MachineRow.objects.create(name=name, document=machine.to_json(), last_seen_at=timezone.now())


def make_model(owner: User | None = None, name: str = "headroom-demo-10m") -> Model:
    spec = read_model_spec(CONFIG)
    return Model.objects.create(
        owner=owner,
        name=name,
        model_type=spec.model_type,
        config=spec.to_config(),
        fingerprint=spec.fingerprint,
        folder="models/none",
        num_parameters=11_534_336,
    )


def make_dataset(owner: User | None = None, name: str = "kjv") -> Dataset:
    return Dataset.objects.create(
        owner=owner,
        name=name,
        format="txt",
        file="datasets/none/data.txt",
        sha256="ab" * 32,
        num_bytes=4_404_445,
        num_documents=1,
        preview="In the beginning God created the heaven and the earth.",
    )


def make_prediction() -> Prediction:
    return Prediction(
        device_peak_bytes=sum(PEAK.values()),
        device_peak_low_bytes=sum(PEAK.values()) - 4 * MIB,
        device_peak_high_bytes=sum(PEAK.values()) + 8 * MIB,
        device_bytes_by_category=PEAK,
        host_peak_bytes=64 * MIB,
        peak_moment="backward of block 12 of 12",
        step_ms=1650.0,
        step_low_ms=1500.0,
        step_high_ms=1900.0,
        lane_busy_ms={"compute": 1600.0, "copy_out": 90.0},
        exposed_copy_ms=12.0,
        tokens_per_s=1241.0,
        total_s=1650.0 * NUM_STEPS / 1000,
        timeline=tuple(
            TimelinePoint(offset_ms=offset_ms, phase=phase, bytes_by_category=sizes)
            for offset_ms, phase, sizes in step_curve(length_ms=1650.0)
        ),
        time_source="measured",
    )


def make_plan() -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=4, accumulation_steps=2), activations=ActivationsPlan(per_block=BLOCKS)
    )


def make_job(owner: User, *, name: str = "kjv-demo", machine: MachineRow | None = None) -> Job:
    model = Model.objects.filter(owner=None).first() or make_model()
    dataset = Dataset.objects.filter(owner=None).first() or make_dataset()
    workload = TrainingWorkload(sequence_length=256, global_batch_size=8, num_steps=NUM_STEPS, learning_rate=1e-3)
    return create_job(
        owner=owner,
        spec={
            "name": name,
            "model": model.pk,
            "dataset": dataset.pk,
            "workload": to_json(workload),
            "goal": to_json(Goal(device_budget_bytes=BUDGET_BYTES)),
            "plan": "chosen",
        },
        model=model,
        dataset=dataset,
        plan=make_plan().to_json(),
        prediction=make_prediction().to_json(),
        machine=machine or MachineRow.objects.first() or make_machine(),
        actor=f"user:{owner.username}",
    )


def start(job: Job) -> Attempt:
    """Claimed and running, in its training phase."""
    assert job.machine is not None
    attempt = claim_job(worker="workbench", machine=job.machine, job_id=job.pk)
    assert attempt is not None
    assert record_started(attempt, pid=4321)
    assert record_phase(attempt, "training")
    return attempt


def step_record(attempt: Attempt, step: int) -> dict[str, Any]:
    sizes = dict(PEAK, activations=PEAK["activations"] + (step % 5) * MIB // 2)
    return {
        "kind": "step",
        "attempt": attempt.number,
        "step": step,
        "time_s": time.time(),
        "loss": 2.4 + 4.6 * math.exp(-step / 30) + 0.05 * math.sin(step * 1.7),
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "step_ms": 1640.0 + 40 * math.sin(step),
        "tokens_per_s": 1245.0 - 30 * math.sin(step),
        "device_peak_bytes": sum(sizes.values()),
        "device_bytes": sizes,
        "host_bytes": 64 * MIB,
    }


def eval_record(attempt: Attempt, step: int) -> dict[str, Any]:
    loss = 2.5 + 4.5 * math.exp(-step / 30)
    return {"kind": "eval", "attempt": attempt.number, "step": step, "time_s": time.time(), "validation_loss": loss}


def timeline_record(attempt: Attempt, step: int) -> dict[str, Any]:
    points = [[offset_ms, sizes] for offset_ms, _, sizes in step_curve(length_ms=1702.0)]
    return {"kind": "timeline", "attempt": attempt.number, "step": step, "time_s": time.time(), "points": points}


def step_curve(*, length_ms: float, num_points: int = 60) -> list[tuple[float, str, dict[str, int]]]:
    """A step as memory sees it: activations rise in forward and fall in backward, gradients appear in backward."""
    points = []
    for index in range(num_points):
        share = index / (num_points - 1)
        phase = "forward" if share < 0.35 else "backward" if share < 0.92 else "optimizer"
        rise = min(share / 0.35, 1.0) if share < 0.35 else max(0.0, (0.92 - share) / 0.57)
        sizes = dict(
            PEAK,
            activations=int(PEAK["activations"] * rise),
            gradients=int(PEAK["gradients"] * min(1.0, max(0.0, share - 0.35) / 0.4)),
            logits_and_loss=PEAK["logits_and_loss"] if 0.33 < share < 0.42 else 0,
        )
        points.append((share * length_ms, phase, sizes))
    return points
