"""Rows for the tests of pages: made by the program's own actions wherever it has one, with sizes as a small model has them."""

import itertools
import math
import time
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.base.errors import OutOfDeviceMemory
from optimizer.base.serialize import to_json
from optimizer.base.units import GIB, MIB
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction, TimelinePoint
from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationRequest, TrainingWorkload
from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_phase, record_started
from webapp.catalog.models import Dataset, Model
from webapp.catalog.models import Machine as MachineRow
from webapp.jobs.actions import create_job
from webapp.jobs.models import Attempt, Job, Sample

NUM_STEPS = 120
BUDGET_BYTES = 480 * MIB
_RECOMPUTE: BlockChoice = "recompute"
_OFFLOAD: BlockChoice = "offload"
_KEEP: BlockChoice = "keep"
BLOCKS = (_RECOMPUTE,) * 6 + (_OFFLOAD,) * 4 + (_KEEP,) * 2
PEAK = {
    "weights": 44 * MIB,
    "gradients": 44 * MIB,
    "optimizer_state": 88 * MIB,
    "activations": 176 * MIB,
    "logits_and_loss": 48 * MIB,
    "temporaries": 9 * MIB,
}
CONFIG: dict[str, Any] = {
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
            "goal": to_json(Goal(device_budget_bytes=BUDGET_BYTES, on_out_of_memory="stop")),
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


def out_of_memory_result(*, moment: str) -> dict[str, Any]:
    """An attempt's result where the device was full in step 3."""
    error = OutOfDeviceMemory(
        requested_bytes=96 * MIB,
        in_use_bytes=402 * MIB,
        budget_bytes=480 * MIB,
        bytes_by_category=dict(PEAK, activations=169 * MIB),
        moment=moment,
    )
    return {
        "outcome": "failed",
        "reason": error.code,
        "message": error.message,
        "error": error.to_json(),
        "step": 2,
        "measured": None,
        "summary": {},
        "artifacts": [],
    }


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
        "data_wait_ms": 0.4,
        "copied_bytes": {"device_to_host": 64 * MIB, "host_to_device": 64 * MIB},
        "lane_ms": {"compute": 1548.0, "copy_in": 42.0 + step % 7, "copy_out": 50.0},
        "stall_ms": {"copy_in": 42.0 + step % 7, "copy_out": 50.0},
    }


def fill(attempt: Attempt, *, num_points: int) -> None:
    """Write as many steps as a long run has, at once; nothing is published to those who watch."""
    made = (
        Sample.of_record(step_record(attempt, step), job_id=attempt.job_id, attempt=attempt.number)
        for step in range(1, num_points + 1)
    )
    while batch := list(itertools.islice(made, 5_000)):
        Sample.objects.bulk_create(batch)
    Job.objects.filter(pk=attempt.job_id).update(step=num_points, num_steps=num_points)


def eval_record(attempt: Attempt, step: int) -> dict[str, Any]:
    loss = 2.5 + 4.5 * math.exp(-step / 30)
    return {"kind": "eval", "attempt": attempt.number, "step": step, "time_s": time.time(), "validation_loss": loss}


def timeline_record(attempt: Attempt, step: int) -> dict[str, Any]:
    points = [[offset_ms, sizes] for offset_ms, _, sizes in step_curve(length_ms=1702.0)]
    common = {"kind": "timeline", "attempt": attempt.number, "step": step, "time_s": time.time()}
    return {**common, "points": points, "spans": step_spans(), "step_ms": 1702.0}


def step_spans() -> list[list[Any]]:
    """The lanes of the same step: four blocks leave in forward and come back in backward."""
    out = [["copy_out", 180.0 + 90 * block, 192.0 + 90 * block, True] for block in range(4)]
    back = [["copy_in", 760.0 + 120 * block, 771.0 + 120 * block, True] for block in range(4)]
    return [*out, *back]


def make_generate_job(owner: User, *, name: str = "answers") -> Job:
    """Weights stream from the host, the cache is packed."""
    plan = GenerationPlan(
        batch_size=8, weights=WeightsPlan(dtype="bf16", place="host", prefetch=1), kv_cache=KvCachePlan(dtype="int8")
    )
    model = Model.objects.filter(owner=None).first() or make_model()
    prompts = Dataset.objects.filter(name="questions").first() or make_dataset(name="questions")
    return create_job(
        owner=owner,
        spec={
            "kind": "generate",
            "name": name,
            "model": model.pk,
            "prompts": prompts.pk,
            "workload": to_json(GenerationRequest(max_new_tokens=64)),
            "goal": to_json(GenerationGoal(device_budget_bytes=200 * MIB, allow_lossy=True)),
            "plan": "chosen",
        },
        model=model,
        dataset=prompts,
        plan=plan.to_json(),
        prediction=make_generation_prediction().to_json(),
        machine=MachineRow.objects.first() or make_machine(),
        actor=f"user:{owner.username}",
        kind="generate",
        num_steps=240,
    )


GENERATION_PEAK = {
    "weights": 60 * MIB,
    "activations": 12 * MIB,
    "logits_and_loss": 9 * MIB,
    "kv_cache": 72 * MIB,
    "temporaries": 3 * MIB,
}


def make_generation_prediction() -> GenerationPrediction:
    peak = sum(GENERATION_PEAK.values())
    return GenerationPrediction(
        device_peak_bytes=peak,
        device_peak_low_bytes=peak,
        device_peak_high_bytes=peak + 4 * MIB,
        device_bytes_by_category=GENERATION_PEAK,
        peak_moment="decode (token 64)",
        kv_cache_bytes=72 * MIB,
        host_peak_bytes=320 * MIB,
        disk_peak_bytes=0,
        copied_bytes={"host_to_device": 30 * 64 * 320 * MIB},
        copied_bytes_per_pass={"host_to_device": 64 * 320 * MIB},
        copied_bytes_per_token={"host_to_device": 320 * MIB},
        prefill_ms=180.0,
        prefill_low_ms=160.0,
        prefill_high_ms=210.0,
        decode_ms=62.0,
        decode_low_ms=55.0,
        decode_high_ms=70.0,
        decode=(),
        tokens_per_s=126.0,
        total_s=122.0,
        lane_busy_ms={"compute": 2600.0, "copy_in": 3100.0},
        exposed_ms={"copy_in": 1450.0},
        prefill_by_kind_ms={},
        decode_by_kind_ms={},
        timeline=(),
        time_source="measured",
    )


def generate_record(attempt: Attempt, number: int) -> dict[str, Any]:
    """The ``number``-th of one in each second."""
    sizes = dict(GENERATION_PEAK, kv_cache=min(72, 4 + number % 18 * 4) * MIB)
    return {
        "kind": "generate",
        "attempt": attempt.number,
        "step": 120 * number,
        "time_s": 1_700_000_000.0 + number,
        "prompts_done": number // 4 * 8,
        "num_prompts": 240,
        "num_errors": 1,
        "num_new_tokens": 120 * number,
        "tokens_per_s": 121.0 + math.sin(number),
        "prefill_ms": 176.0,
        "decode_ms": 63.5,
        "device_peak_bytes": sum(GENERATION_PEAK.values()),
        "device_bytes": sizes,
        "host_bytes": 320 * MIB,
        "run_ms": 1000.0 * number,
        "copied_bytes": {"host_to_device": 15 * 320 * MIB * number + number % 3 * MIB},
        "lane_ms": {"compute": 640.0 * number, "copy_in": 360.0 * number},
        "stall_ms": {"copy_in": 360.0 * number},
    }


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
