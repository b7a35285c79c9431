"""Jobs to draw mixes from: training and generations, resident and offloaded, each priced by the planner for its machine.

Three cards of 8 to 24 GB from the table, with published models; and a CPU device of 24 MiB with the tests' tiny ones, which
trades bytes for time in the same ways. A budget that nothing fits in gives no subject.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common.machines import make_cpu_machine
from benchmarks.search.profiles import TINY
from optimizer.api.plan import plan_model
from optimizer.api.plan_generation import plan_generation
from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import GIB, MIB
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.optimizer_state import OptimizerStatePins
from optimizer.plan.pins.training import Pins
from optimizer.workload import Adapter, GenerationWorkload, TrainingWorkload

CARDS = ("RTX 4060", "T4", "RTX 4090")
CPU = "CPU device"
_HOST_BYTES = 32 * GIB
_DEVICE_BYTES = 24 * MIB
_ON_DISK = Pins(optimizer_state=OptimizerStatePins(place="disk"))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One job under the plan that was found for its budget."""

    name: str
    machine: str
    """Name of its machine, a card's or ``CPU``."""
    budget_bytes: int
    plan: dict[str, Any]
    prediction: dict[str, Any]
    device_bytes: int
    """Most that its process takes of the device in any stage: upper ends, with context, workspaces and the allocator's gaps.
    Worked out from the prediction itself and not by the code that admits jobs, which is held against it."""
    host_bytes: int
    """The same of the host tier."""


@cache
def machines() -> dict[str, Machine]:
    """Every machine of the benchmark, by name."""
    bare = make_cpu_machine()
    rates = replace(
        bare.rates,
        disk_read_bytes_per_s=4e8,
        disk_write_bytes_per_s=3e8,
        host_to_device_bytes_per_s=1e9,
        device_to_host_bytes_per_s=1e9,
    )
    cpu = replace(
        bare,
        name=CPU,
        device=replace(bare.device, memory_bytes=_DEVICE_BYTES),
        rates=rates,
        host_memory_bytes=64 * MIB,
        disk_free_bytes=GIB,
    )
    cards = {name: table_machine(name, host_memory_bytes=_HOST_BYTES) for name in CARDS}
    return {**cards, CPU: cpu}


def price_subjects(profiles_folder: Path, *, names: tuple[str, ...]) -> list[Subject]:
    """Subjects of these machines. profiles_folder: where traced models are kept."""
    found = []
    for name in names:
        cases = _tiny_cases() if name == CPU else _card_cases()
        for what, model, workload, goal in cases:
            subject = _price(f"{what}, {name}", name, model, workload, goal, profiles_folder)
            if subject is not None:
                found.append(subject)
    return found


_Case = tuple[str, Any, TrainingWorkload | GenerationWorkload, Goal | GenerationGoal]


def _card_cases() -> Iterator[_Case]:
    steps = TrainingWorkload(sequence_length=512, global_batch_size=8, num_steps=100)
    for model, budgets in (("gpt2", (2, 4)), ("qwen2.5-0.5b", (3, 6))):
        for budget in budgets:
            for is_lossy in (False, True):
                words = f"{model} in {budget} GiB{', bf16 allowed' if is_lossy else ''}"
                goal = Goal(device_budget_bytes=budget * GIB, allow_lossy=is_lossy)
                yield words, model, steps, goal
    yield "qwen2.5-0.5b in 6 GiB, state on the disk", "qwen2.5-0.5b", steps, Goal(device_budget_bytes=6 * GIB, pins=_ON_DISK)
    adapted = replace(steps, mode="finetune", adapter=Adapter(rank=8))
    yield "LoRA of qwen2.5-0.5b in 3 GiB", "qwen2.5-0.5b", adapted, Goal(device_budget_bytes=3 * GIB)
    answers = GenerationWorkload(prompt_length=128, num_new_tokens=32, num_sequences=8)
    for model, budget, is_lossy in (
        ("gpt2", 1, False),
        ("qwen2.5-0.5b", 1, False),
        ("qwen2.5-0.5b", 3, False),
    ):
        words = f"generating with {model} in {budget} GiB{', bf16 allowed' if is_lossy else ''}"
        yield words, model, answers, GenerationGoal(device_budget_bytes=budget * GIB, allow_lossy=is_lossy)


def _tiny_cases() -> Iterator[_Case]:
    steps = TrainingWorkload(sequence_length=128, global_batch_size=4, num_steps=100)
    for name in ("llama", "gpt2"):
        model = read_model_spec(TINY[name])
        for budget_mib in (3, 5, 8, 16):
            goal = Goal(device_budget_bytes=budget_mib * MIB)
            yield f"tiny {name} in {budget_mib} MiB", model, steps, goal
        on_disk = Goal(device_budget_bytes=8 * MIB, pins=_ON_DISK)
        yield f"tiny {name} in 8 MiB, state on the disk", model, steps, on_disk
        answers = GenerationWorkload(prompt_length=64, num_new_tokens=32, num_sequences=16)
        if name == "llama":
            for budget_mib in (1, 4):
                goal_of_answers = GenerationGoal(device_budget_bytes=budget_mib * MIB)
                yield f"generating with tiny {name} in {budget_mib} MiB", model, answers, goal_of_answers


def _price(
    what: str,
    machine: str,
    model: Any,
    workload: TrainingWorkload | GenerationWorkload,
    goal: Goal | GenerationGoal,
    profiles_folder: Path,
) -> Subject | None:
    """None where nothing fits into the budget."""
    there = machines()[machine]
    prediction: Prediction | GenerationPrediction
    try:
        if isinstance(workload, TrainingWorkload) and isinstance(goal, Goal):
            trained = plan_model(
                model, workload=workload, goal=goal, machine=there, profiles_folder=profiles_folder
            ).result.chosen
            plan, prediction = trained.plan.to_json(), trained.prediction
        elif isinstance(workload, GenerationWorkload) and isinstance(goal, GenerationGoal):
            generated = plan_generation(
                model, workload=workload, goal=goal, machine=there, profiles_folder=profiles_folder
            ).chosen
            plan, prediction = generated.plan.to_json(), generated.prediction
        else:
            raise TypeError(f"{what} has a workload of one kind and a goal of another")
    except NoFeasiblePlan:
        return None
    return Subject(
        name=what,
        machine=machine,
        budget_bytes=goal.device_budget_bytes,
        plan=plan,
        prediction=prediction.to_json(),
        device_bytes=process_bytes(prediction),
        host_bytes=host_bytes(prediction),
    )


def process_bytes(prediction: Prediction | GenerationPrediction) -> int:
    """Most bytes of the device that the job's process takes, at the upper ends of what is predicted."""
    tensor_bytes = prediction.device_peak_high_bytes
    if isinstance(prediction, Prediction):
        tensor_bytes = max(tensor_bytes, prediction.highest_peak_bytes)
    memory = prediction.memory
    if memory is None:
        return tensor_bytes
    return max(tensor_bytes, memory.allocated.high) + memory.process.high - memory.allocated.high


def host_bytes(prediction: Prediction | GenerationPrediction) -> int:
    stages = prediction.stages if isinstance(prediction, Prediction) else ()
    return max([prediction.host_peak_bytes, *(stage.host_peak_bytes for stage in stages)])
