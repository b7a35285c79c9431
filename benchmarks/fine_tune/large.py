"""A checkpoint of 8 billion parameters (16 GB): planned for a 12 GB card, loaded, trained, saved, merged, exported.

QLoRA (nf4, rank 16) on short sequences, two steps, on the CPU device. Each stage's peak, as predicted, is held against the
meter, and what the process takes against both: its anonymous memory, less what it had before the model. Everything lies in
a temporary folder, which needs some 45 GB (``TMPDIR``), and goes at the end. ``--quick``: a model of 0.2 billion.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, goal
from benchmarks.fine_tune.anonymous import AnonymousMemory
from benchmarks.fine_tune.checkpoint import make_checkpoint
from optimizer.base.serialize import to_json
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.tokens import tokenize_dataset
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPins
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.core import search
from optimizer.search.training import training_problem
from optimizer.workload import Adapter, Export, TrainingWorkload

NAME = "large"
CARD = "RTX 3060 12GB"
CARD_BYTES = 12_000_000_000
SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "0.2B": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16},
}
_COMMON: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void.\n\n"
_SHARE_OVER, _SHARE_OFF = 0.02, 0.01
GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_MMAP_THRESHOLD_": "262144"}
"""The C library returns what is freed, rather than keep it for later (``docs/decisions/0032``)."""
_STEPS_OF = {"training": ("first_step", "steady_step"), "evaluating": ("evaluation",)}


def measure_large(options: Options) -> Iterator[Row]:
    """One row for each thing that is shown. ``--of``: shapes."""
    wanted = [name for name in SHAPES if options.of and options.wants(name)] or ["0.2B" if options.quick else "8B"]
    for name in wanted:
        folder = Path(tempfile.mkdtemp(prefix="headroom-large-"))
        try:
            yield from ({"part": NAME, "shape": name, **row} for row in _measure(name, folder, seed=options.seed))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(name: str, folder: Path, *, seed: int) -> Iterator[Row]:
    config = {**_COMMON, **SHAPES[name]}
    spec = read_model_spec(config)
    began_s = time.perf_counter()
    num_bytes = make_checkpoint(folder / "model", config, seed=seed)
    yield {"what": "checkpoint", "num_bytes": num_bytes, "seconds": time.perf_counter() - began_s}
    workload = TrainingWorkload(
        mode="finetune",
        sequence_length=64,
        global_batch_size=1,
        num_steps=2,
        eval_batches=1,
        eval_every_steps=0,
        checkpoint_every_steps=1,
        sample_tokens=0,
        adapter=Adapter(rank=16, alpha=32),
        export=Export(gguf="q8_0"),
    )
    began_s = time.perf_counter()
    profile = profile_model(spec, adapter=workload.adapter)
    yield {"what": "profile", "seconds": time.perf_counter() - began_s}
    began_s = time.perf_counter()
    plan = _plan_for_card(profile, workload)
    yield {"what": "plan", "seconds": time.perf_counter() - began_s, "plan": plan.to_json()}
    machine = make_cpu_machine()
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    prediction = add_memory(prediction, profile, plan=plan, workload=workload, machine=machine)
    yield from _run(config, workload, plan, prediction, folder)


def _plan_for_card(profile: Profile, workload: TrainingWorkload) -> Plan:
    pins = Pins(weights=WeightsPins(dtype="bf16", frozen="nf4"))
    goal_of = Goal(device_budget_bytes=CARD_BYTES, allow_lossy=True, pins=pins)
    problem = training_problem(profile, workload=workload, goal=goal_of, machine=table_machine(CARD))
    return search(problem).chosen.plan


def _run(
    config: dict[str, Any], workload: TrainingWorkload, plan: Plan, prediction: Prediction, folder: Path
) -> Iterator[Row]:
    text = folder / "text.txt"
    text.write_text(_TEXT * 400)
    tokens = tokenize_dataset(
        file=str(text), format="txt", tokenizer_file=str(TOKENIZER_FILE), folder=str(folder / "tokens"), vocab_size=4096
    )
    given = folder / "run.json"
    document = {
        "config": config,
        "plan": plan.to_json(),
        "workload": to_json(workload),
        "device_budget_bytes": CARD_BYTES,
        "job_folder": str(folder / "job"),
        "weights_folder": str(folder / "model"),
        "token_file": str(tokens.folder),
    }
    given.write_text(json.dumps(document))
    command = [sys.executable, "-m", "benchmarks.fine_tune.large_run", str(given)]
    said: list[dict[str, Any]] = []
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | GIVES_BACK)
    with started as process, AnonymousMemory(process.pid) as memory:
        assert process.stdout is not None
        said += [json.loads(line) for line in process.stdout if line.startswith("{")]
    if process.returncode != 0:
        raise RuntimeError(f"the run ended with exit code {process.returncode}")
    yield from _compare(said, memory, prediction)


def _compare(said: Sequence[dict[str, Any]], memory: AnonymousMemory, prediction: Prediction) -> Iterator[Row]:
    result = next(line["result"] for line in said if "result" in line)
    imported_s = next(line["time_s"] for line in said if line.get("stage") == "imported")
    base_bytes = memory.peak_bytes(imported_s, imported_s + 1.0)
    windows = _windows(said)
    for stage in prediction.stages:
        measured = result["measured"]["stages"].get(stage.stage)
        if measured is None:
            continue
        spans = windows.get(stage.stage, [])
        peak_bytes = max((memory.peak_bytes(*span) for span in spans), default=0)
        yield {
            "what": "stage",
            "stage": stage.stage,
            **{f"predicted_{tier}_bytes": getattr(stage, f"{tier}_peak_bytes") for tier in ("device", "host", "disk")},
            **{f"measured_{tier}_bytes": measured[f"{tier}_peak_bytes"] for tier in ("device", "host", "disk")},
            "predicted_process_bytes": base_bytes + stage.together_peak_bytes,
            "measured_process_bytes": peak_bytes,
            "seconds": sum(end_s - begin_s for begin_s, end_s in spans),
        }
    whole = max(num_bytes for _, num_bytes in memory.samples)
    predicted = base_bytes + max(stage.together_peak_bytes for stage in prediction.stages)
    yield {"what": "process", "base_bytes": base_bytes, "predicted_bytes": predicted, "measured_bytes": whole}
    losses = [line["message"]["loss"] for line in said if line.get("message", {}).get("kind") == "step"]
    yield {
        "what": "result",
        "outcome": result["outcome"],
        "losses": losses,
        "artifacts": [{key: found[key] for key in ("kind", "name", "num_bytes")} for found in result["artifacts"]],
        "seconds": said[-1]["time_s"] - imported_s,
    }


def _windows(said: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """When the run was in each stage: some say so themselves, steps and evaluations by the phase they are in."""
    found: dict[str, list[tuple[float, float]]] = {}
    began: dict[str, float] = {}
    phase, phase_s = "", 0.0
    for line in said:
        if "stage" in line and line["stage"] != "imported":
            if line["begins"]:
                began[line["stage"]] = line["time_s"]
            else:
                found.setdefault(line["stage"], []).append((began[line["stage"]], line["time_s"]))
        elif line.get("message", {}).get("type") == "phase":
            for stage in _STEPS_OF.get(phase, ()):
                found.setdefault(stage, []).append((phase_s, line["time_s"]))
            phase, phase_s = line["message"]["phase"], line["time_s"]
    return found


def summarize_large(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    goals: dict[str, GoalEntry] = {}
    for shape in dict.fromkeys(row["shape"] for row in rows if "shape" in row):
        of = [row for row in rows if row.get("shape") == shape]
        planned = [row["seconds"] for row in of if row["what"] == "plan"]
        if planned:
            goals[f"{shape}: seconds to plan for a 12 GB card"] = goal(planned[0], 3.0, met=planned[0] <= 3.0)
        for row in (row for row in of if row["what"] == "process"):
            over = row["measured_bytes"] / row["predicted_bytes"] - 1
            goals[f"{shape}: process's memory over the predicted peak"] = goal(over, _SHARE_OVER, met=over <= _SHARE_OVER)
        stages = [row for row in of if row["what"] == "stage"]
        for tier in ("device", "host", "disk"):
            off = max((_off(row, tier) for row in stages), default=0.0)
            goals[f"{shape}: worst stage's peak on the {tier}, share off"] = goal(off, _SHARE_OFF, met=off <= _SHARE_OFF)
    return goals


def _off(row: Row, tier: str) -> float:
    """Share of what is on device and host together, where the tier itself holds next to nothing."""
    predicted, measured = row[f"predicted_{tier}_bytes"], row[f"measured_{tier}_bytes"]
    whole = measured if tier == "disk" else max(measured, row["measured_device_bytes"])
    return abs(predicted - measured) / whole if whole else float(predicted != measured)


PART = Part(name=NAME, measure=measure_large, summarize=summarize_large, case="shape", is_extra=False)
