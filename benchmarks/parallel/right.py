"""Carries out drawn plans on several ranks and on one device, and holds losses, weights and peaks, on the device and on the host,
against each other.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.record import GoalEntry, Row, all_of, failure, goal
from optimizer.base.errors import HeadroomError
from optimizer.estimate.categories.weights import estimate_home_bytes
from optimizer.estimate.step.setting import lay_out_ranks
from optimizer.estimate.training import estimate_training, simulate_step
from optimizer.models.spec import read_model_spec
from optimizer.profile.profile import Profile
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, draw_cases, draw_cuts, draw_replicas
from tests.optimizer.runtime.ranks.pool import RankPool
from tests.optimizer.runtime.ranks.rank_process import carry_out_steps

NUM_CASES = 300
NUM_RANKS = (2, 4)
_FP32_LOSS = 1e-6
_MEDIAN_PERCENT, _WORST_PERCENT = 0.1, 1.0


def compare_all(count: int, *, seed: int) -> Iterator[Row]:
    """One row for each case. Each set of ranks is one set of processes, which stay."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as name, contextlib.closing(RankPool(Path(name), num_ranks=2)) as pool:
        share = max(2, count // 5)
        others = [*draw_cuts(share, seed=seed, num_ranks=NUM_RANKS), *draw_replicas(share, seed=seed)]
        for number, case in enumerate([*draw_cases(count, seed=seed, num_ranks=NUM_RANKS), *others]):
            folder = Path(name) / str(number)
            try:
                yield compare(case, pool, folder) | {"number": number}
            except Exception as error:
                yield failure(f"case {number}, {case.name}", error)


def compare(case: RankCase, pool: RankPool, folder: Path) -> Row:
    """The largest differences between ranks and one device, and between measured and predicted peaks."""
    on_ranks, on_one = folder / "ranks", folder / "one"
    for each in (on_ranks, on_one):
        each.mkdir(parents=True)
    command = {"kind": "steps", "case": case.to_json(), "folder": str(on_ranks)}
    answers = [reply["answer"] for reply in pool.run(command, num_ranks=case.num_ranks, timeout_s=300.0)]
    alone = carry_out_steps(case.on_one_device, ranks=None, folder=on_one)
    measured = [max(answer["peaks"][1:]) for answer in answers]
    measured_on_host = [max(answer["host_peaks"][1:]) for answer in answers]
    predicted, predicted_on_host = predict_peaks(case)
    return {
        "what": "case",
        "name": case.name,
        "num_ranks": case.num_ranks,
        "layout": "cut" if case.plan.layout.is_cut else case.plan.layout.data,
        "num_replicas": case.plan.layout.replicas,
        "dtype": case.plan.weights.dtype,
        "is_fp32": case.plan.weights.dtype == "fp32" and case.plan.weights.autocast == "off",
        "optimizer": case.workload.optimizer,
        "weights_place": case.plan.weights.place,
        # Of blocks that share parameters none has a home.
        "shares_homes": case.plan.shares_homes(trains_all=case.workload.adapter is None) and alone["home_bytes"] > 0,
        # Stages of a model add up what one device does.
        "has_order": not case.has_two_terms and not case.plan.layout.is_cut,
        "are_ranks_equal": len({answer["weights_sha256"] for answer in answers}) == 1,
        "has_same_bits": answers[0]["weights_sha256"] == alone["weights_sha256"],
        "loss_difference": _largest_difference(answers[0]["losses"], alone["losses"]),
        "weight_difference": _largest_of(on_ranks, on_one),
        "measured_peaks_bytes": measured,
        "predicted_peaks_bytes": predicted,
        "peak_error_percent": _error_percent(measured, predicted) if predicted else None,
        "measured_host_peaks_bytes": measured_on_host,
        "predicted_host_peaks_bytes": predicted_on_host,
        "is_host_exact": measured_on_host == predicted_on_host if predicted else None,
        "num_shared_memories": len({inode for answer in answers for inode, _ in answer["shared_memory"]}),
    }


def predict_peaks(case: RankCase) -> tuple[list[int], list[int]]:
    """By rank, on the device and on the host; empty where the plan cannot be priced."""
    spec = read_model_spec({**MODELS[case.model], "num_hidden_layers": len(case.plan.activations.per_block)})
    try:
        profile = trace(spec, extent=extent_of([(case.plan, case.workload)]), adapter=case.workload.adapter)
        machine = replace(make_cpu_machine(), num_threads=case.num_ranks)
        found = estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine)
        laid = lay_out_ranks(profile, plan=case.plan, workload=case.workload, machine=machine)
    except HeadroomError:
        return [], []
    if len(laid) == 1:
        # All are alike, but for the bytes that are left over of what they share in equal parts.
        on_host = simulate_step(laid[0]).host_peak_bytes
        return list(found.rank_peak_bytes), [on_host - _less_bytes(case, profile, rank) for rank in range(case.num_ranks)]
    in_order = sorted(laid, key=lambda each: each.rank)
    of_replica = [simulate_step(each).host_peak_bytes for each in in_order]
    return list(found.rank_peak_bytes), of_replica * case.plan.layout.replicas


def _less_bytes(case: RankCase, profile: Profile, rank: int) -> int:
    """Bytes that a rank has less of the homes than rank 0."""
    trains_all = case.workload.adapter is None
    first, own = (
        estimate_home_bytes(profile, case.plan, trains_all=trains_all, rank=each)["host"] for each in (0, rank)
    )
    return first - own


def summarize(rows: Sequence[Row], *, num_cases: int) -> dict[str, GoalEntry]:
    """The goals: losses, bits and peaks of the cases."""
    cases = [row for row in rows if row["what"] == "case"]
    exact = [row for row in cases if row["is_fp32"] and row["optimizer"] != "lion"]
    errors = sorted(abs(row["peak_error_percent"]) for row in cases if row["peak_error_percent"] is not None)
    worst_loss = max((row["loss_difference"] for row in exact), default=None)
    return {
        "cases carried out": goal(len(cases), f">= {num_cases}", met=len(cases) >= num_cases, needs="all cases"),
        "ranks of a case with equal weights": all_of(row["are_ranks_equal"] for row in cases),
        "bits of one device where the order of sums is the same": all_of(
            row["has_same_bits"] for row in cases if not row["has_order"]
        ),
        "largest difference of a loss, fp32 but for Lion": goal(
            worst_loss, f"<= {_FP32_LOSS:g}", met=worst_loss is not None and worst_loss <= _FP32_LOSS
        ),
        "peak of each rank, median error, %": _at_most(errors[len(errors) // 2] if errors else None, _MEDIAN_PERCENT),
        "peak of each rank, worst error, %": _at_most(errors[-1] if errors else None, _WORST_PERCENT),
        "cases whose peaks were predicted": goal(len(errors) or None, "reported", met=bool(errors)),
        "bytes on the host of each rank, to the byte": all_of(
            row["is_host_exact"] for row in cases if row["is_host_exact"] is not None
        ),
        "one home in memory where ranks share it, none elsewhere": all_of(
            row["num_shared_memories"] == row["shares_homes"] * row["num_replicas"] for row in cases
        ),
        "cases whose ranks share homes": goal(
            sum(row["shares_homes"] for row in cases) or None, "reported", met=any(row["shares_homes"] for row in cases)
        ),
    }


def _at_most(value: float | None, limit: float) -> GoalEntry:
    return goal(value, f"<= {limit:g}", met=value is not None and value <= limit)


def _largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def _largest_of(folder: Path, other: Path) -> float:
    found: dict[str, Any] = load_file(folder / "weights-0.safetensors")
    expected: dict[str, Any] = load_file(other / "weights-0.safetensors")
    return max(float((found[name].float() - expected[name].float()).abs().max()) for name in expected)


def _error_percent(measured: Sequence[int], predicted: Sequence[int]) -> float:
    """The error of the rank that was predicted worst."""
    errors = [100 * (said / found - 1) for said, found in zip(predicted, measured, strict=True)]
    return max(errors, key=abs)
