"""Measures the cost of an estimate: ``python -m benchmarks.planning [--quick] [--json FILE]``.

- Cold: ``estimate`` of an 80-layer 70B Llama in a fresh process that finds no kept profile, from config.json to the printed
  prediction; warm: the same again. Wall and CPU seconds of the process with its child, and the largest resident set of either.
- In process: the first price of a plan of a shape, and each later one, with the kept profile loaded.
- An 8B Llama: the estimate cold beside torch's MemTracker of the same step under fake tensors, each in a fresh process, imports
  included; and what each takes once everything is imported.

Wall seconds mean something on an idle machine only; CPU seconds are beside them.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.record import GoalEntry, Record, at_most, describe_machine, goal
from optimizer.models.presets import PRESETS

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_8B = "llama-3-8b"
GPU = "H100 SXM"
SEQUENCE_LENGTH = 512
MOST_COLD_S, MOST_WARM_MS, MOST_RSS_BYTES, LEAST_RATIO = 3.0, 50.0, 1_500_000_000, 20.0
"""The goals: the last is how many times slower MemTracker is at least."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fresh process."""

    wall_s: float
    cpu_s: float
    rss_bytes: int
    output: str


def main() -> int:
    """Exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each process once, and no MemTracker, which takes a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--in-process", choices=["trace", "price", "mem-tracker"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process is not None:
        measured = {"trace": time_trace, "price": time_prices, "mem-tracker": time_mem_tracker}[options.in_process]()
        print(json.dumps(measured))
        return 0
    record = Record(file=options.json, machine=describe_machine(), is_quick=options.quick)
    rows, goals = measure(num_runs=1 if options.quick else 5, tracks_memory=not options.quick)
    for name, value in rows.items():
        record.add({"what": name, "value": value})
    return record.finish(goals)


def measure(*, num_runs: int, tracks_memory: bool) -> tuple[dict[str, float], dict[str, GoalEntry]]:
    """Return medians, and the goals. tracks_memory: time torch's MemTracker too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.json"
        config.write_text(json.dumps(LLAMA_70B))
        cold = [_estimate(str(config), home=folder / f"cold{index}") for index in range(num_runs)]
        warm = [_estimate(str(config), home=folder / "cold0") for _ in range(num_runs)]
        small = [_estimate(LLAMA_8B, home=folder / f"small{index}") for index in range(num_runs)]
        prices = json.loads(_run("benchmarks.planning", "--in-process", "price", home=folder / "cold0").output)
    trace = json.loads(_run("benchmarks.planning", "--in-process", "trace").output)
    median = statistics.median
    rows: dict[str, float] = {
        "70B cold, wall s": median(run.wall_s for run in cold),
        "70B cold, CPU s": median(run.cpu_s for run in cold),
        "70B cold, largest resident MB": max(run.rss_bytes for run in cold) / 1e6,
        "70B warm process, wall s": median(run.wall_s for run in warm),
        "70B warm process, CPU s": median(run.cpu_s for run in warm),
        "70B kept profile loaded, CPU ms": prices["load_ms"],
        "70B first price, CPU ms": prices["first_ms"],
        "70B each later price, CPU ms": prices["later_ms"],
        "8B cold, CPU s": median(run.cpu_s for run in small),
        "8B trace and price alone, CPU s": trace["cpu_s"],
        "8B our peak GB": trace["peak_bytes"] / 1e9,
        **(_compare_mem_tracker(trace, prices) if tracks_memory else {}),
    }
    rows = {name: round(value, 4) for name, value in rows.items()}
    cold_s, warm_ms = rows["70B cold, wall s"], rows["70B first price, CPU ms"]
    rss_bytes, ratio = max(run.rss_bytes for run in cold), rows.get("MemTracker / ours, imported")
    goals = {
        "70B cold, wall s": at_most(cold_s, MOST_COLD_S, needs="full size"),
        "once profiled, CPU ms": at_most(warm_ms, MOST_WARM_MS),
        "largest resident bytes": at_most(rss_bytes, MOST_RSS_BYTES),
        "how many times slower MemTracker is": goal(ratio, f">= {LEAST_RATIO}", met=ratio is not None and ratio >= LEAST_RATIO),
    }
    return rows, goals


def _compare_mem_tracker(trace: dict[str, float], prices: dict[str, float]) -> dict[str, float]:
    """The time of torch's MemTracker for the same step of the 8B, beside ours."""
    tracked = _run("benchmarks.planning", "--in-process", "mem-tracker")
    tracker = json.loads(tracked.output)
    return {
        "8B MemTracker, fresh process, CPU s": tracked.cpu_s,
        "8B MemTracker alone, CPU s": tracker["cpu_s"],
        "8B MemTracker's peak GB": tracker["peak_bytes"] / 1e9,
        "MemTracker / ours, imported": tracker["cpu_s"] / trace["cpu_s"],
        "MemTracker / ours, once profiled": tracker["cpu_s"] * 1000 / prices["first_ms"],
    }


def time_trace() -> dict[str, float]:
    """A plan of the 8B from its config to its price, with everything imported."""
    import torch

    from optimizer.estimate.training import estimate_training
    from optimizer.hardware.devices import table_machine
    from optimizer.models.build import build_config
    from optimizer.profile.plan_extent import extent_of_plans
    from optimizer.profile.trace.trace import profile_model

    torch.set_num_threads(1)
    spec, plan, workload = PRESETS[LLAMA_8B].spec, _plain_plan(PRESETS[LLAMA_8B].spec.num_blocks), _workload()
    machine = table_machine(GPU)
    build_config(spec)
    started_s = time.process_time()
    profile = profile_model(spec, extent=extent_of_plans([plan], workload=workload))
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    return {"cpu_s": time.process_time() - started_s, "peak_bytes": prediction.device_peak_bytes}


def time_prices() -> dict[str, float]:
    """Time with the 70B's kept profile: loading it, the first price of a shape, each later one."""
    from optimizer.estimate.training import estimate_training
    from optimizer.hardware.devices import table_machine
    from optimizer.models.spec import read_model_spec
    from optimizer.profile.keep.kept import read_kept_profile

    spec, workload, machine = read_model_spec(LLAMA_70B), _workload(), table_machine(GPU)
    plan = _plain_plan(spec.num_blocks)
    times_s = [time.process_time()]
    profile = read_kept_profile(spec.fingerprint)
    assert profile is not None
    times_s.append(time.process_time())
    for _ in range(21):
        estimate_training(profile, plan=plan, workload=workload, machine=machine)
        times_s.append(time.process_time())
    took_ms = [1000 * (after - before) for before, after in itertools.pairwise(times_s)]
    return {"load_ms": took_ms[0], "first_ms": took_ms[1], "later_ms": statistics.median(took_ms[2:])}


def time_mem_tracker() -> dict[str, float]:
    """The same step of the 8B, as an ordinary loop runs it, under fake tensors."""
    import torch

    from benchmarks.accuracy.cases import Case
    from benchmarks.common.estimators import track_step
    from optimizer.models.build import build_config

    torch.set_num_threads(1)
    spec = PRESETS[LLAMA_8B].spec
    build_config(spec)
    case = Case(
        name=LLAMA_8B,
        model=LLAMA_8B,
        shape="planning",
        techniques=(),
        config=spec.config,
        workload=_workload(),
        plan=_plain_plan(spec.num_blocks),
    )
    started_s = time.process_time()
    peak_bytes = track_step(case)
    return {"cpu_s": time.process_time() - started_s, "peak_bytes": peak_bytes}


def _workload() -> Any:
    from optimizer.workload import TrainingWorkload

    return TrainingWorkload(sequence_length=SEQUENCE_LENGTH, global_batch_size=1)


def _plain_plan(num_blocks: int) -> Any:
    from optimizer.plan.activations import ActivationsPlan, BlockChoice
    from optimizer.plan.batch import BatchPlan
    from optimizer.plan.plan import Plan

    keep: BlockChoice = "keep"
    blocks = ActivationsPlan(per_block=(keep,) * num_blocks)
    return Plan(batch=BatchPlan(micro_batch_size=1, accumulation_steps=1), activations=blocks)


def _estimate(model: str, *, home: Path) -> Run:
    options = ["--model", model, "--gpu", GPU, "--plan", "keep_all", "--json"]
    return _run("optimizer.cli", "estimate", *options, "--batch", "1", "--sequence-length", str(SEQUENCE_LENGTH), home=home)


def _run(module: str, *options: str, home: Path | None = None) -> Run:
    """Run a module and measure it with all the processes it started, by the kernel's own count."""
    environment = {**os.environ, **({"HEADROOM_HOME": str(home)} if home is not None else {})}
    started_s = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", module, *options], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{module} ended with code {process.returncode}")
    return Run(
        wall_s=time.perf_counter() - started_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        # Of the process and of those it waited for, whichever is larger; kilobytes on Linux.
        rss_bytes=usage.ru_maxrss * 1024,
        output=output,
    )


if __name__ == "__main__":
    sys.exit(main())
