"""Steps that ranks take alone over a slow link: how long a step is, and what the loss of a small model becomes.

Times: two ranks over a relay of 200 Mbit/s and 20 ms, every step shared or eight alone in each format; the mean of whole rounds
against what the plan says of the network beside the compute that the same steps took. Losses: a small decoder on the bytes of a
real text (the bundled King James Bible), the same steps of two ranks with the same batches, shared or alone, averaged or with
DiLoCo's outer step. One seed, one model and few steps: they show what it costs here, not what it costs a large model.
"""

import hashlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.record import GoalEntry, Row, failure, goal
from benchmarks.parallel.links.namespaces import PROFILES, NoNamespaces
from benchmarks.parallel.network import SHAPES, Case, find_link, make_profile, start_ranks
from optimizer.base.serialize import to_json
from optimizer.data.bundled import TEXT_FILE
from optimizer.data.token_file import FORMAT_VERSION, TOKENS_FILE, TokenManifest, write_manifest
from optimizer.estimate.training import estimate_training
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, SyncFormat
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload
from tests.optimizer.runtime.ranks.pool import RankPool
from tests.optimizer.runtime.tiny import write_tokenizer

_TIME_PERCENT: Final = 15.0
_LOSS_SHARE: Final = 1.05
_SLOW: Final = PROFILES[-1]
_EVERY: Final = 8
_FORMATS: Final[tuple[SyncFormat, ...]] = ("fp32", "bf16", "int8")
_NUM_LETTERS: Final = 256
_MODEL: Final[dict[str, Any]] = {
    "model_type": "headroom_decoder",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": _NUM_LETTERS,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_block": 8,
}
_NUM_STEPS: Final = 256


def _make_case(layout: DeviceLayout) -> Case:
    return Case(
        shape=SHAPES[1],
        plan=Plan(
            layout=layout,
            batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
            activations=ActivationsPlan(per_block=("keep", "keep")),
        ),
        workload=TrainingWorkload(sequence_length=16, global_batch_size=2, num_steps=_EVERY),
    )


def time_all(*, is_quick: bool) -> Iterator[Row]:
    """Shared steps, and steps alone in each format, in turn; a failure where the link cannot be made."""
    layouts = [DeviceLayout(num_devices=2)]
    layouts += [DeviceLayout(num_devices=2, sync_every=_EVERY, sync_format=form) for form in _FORMATS]
    try:
        yield from _time([_make_case(layout) for layout in layouts], num_rounds=1 if is_quick else 3)
    except NoNamespaces as error:
        yield failure(_SLOW.name, error)


def _time(cases: Sequence[Case], *, num_rounds: int) -> Iterator[Row]:
    profile = make_profile(cases[0].shape, cases)
    found: list[list[list[dict[str, Any]]]] = [[] for _ in cases]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = start_ranks(stack, folder, 2, _SLOW)
        link = find_link(_SLOW, pool, 2)
        for _ in range(num_rounds):
            for case, answers in zip(cases, found, strict=True):
                command = {
                    "plan": case.plan.to_json(),
                    "workload": to_json(case.workload),
                    "config": case.shape.config,
                    "folder": str(folder),
                    # One whole round, whichever of its steps is the first.
                    "num_steps": _EVERY if case.plan.layout.steps_alone else 2,
                }
                answers.append([reply["answer"] for reply in pool.run(command, num_ranks=2, timeout_s=120.0)])
    machine = replace(make_cpu_machine(), num_threads=2, num_devices=2, peers=link)
    for case, answers in zip(cases, found, strict=True):
        layout = case.plan.layout
        predicted = estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine)
        network_ms = predicted.lane_busy_ms["network"]
        rounds = [[max(both) for both in zip(*(each["step_ms"] for each in ranks), strict=True)] for ranks in answers]
        step_ms = statistics.median(statistics.fmean(steps) for steps in rounds)
        compute_ms = statistics.median(statistics.fmean(each["compute_ms"]) for ranks in answers for each in ranks)
        sent_bytes = statistics.median(each["sent_bytes"] for ranks in answers for each in ranks)
        yield {
            "what": "time",
            "sync_every": layout.sync_every,
            "sync_format": layout.sync_format,
            "predicted_sent_bytes": predicted.network_bytes,
            "measured_sent_bytes": round(sent_bytes),
            "predicted_network_ms": network_ms,
            "compute_ms": compute_ms,
            "step_ms": step_ms,
            "step_error_percent": 100 * ((network_ms + compute_ms) / step_ms - 1),
            "all_step_ms": rounds,
        }


def train_all(*, is_quick: bool) -> Iterator[Row]:
    """The last validation loss of the same job under each layout."""
    num_steps = 64 if is_quick else _NUM_STEPS
    layouts = [DeviceLayout(num_devices=2)]
    for every in (8,) if is_quick else (8, 32):
        layouts += [DeviceLayout(num_devices=2, sync_every=every, sync_format=form) for form in _FORMATS]
        layouts.append(DeviceLayout(num_devices=2, sync_every=every, sync_rule="nesterov"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_text(folder / "tokens")
        write_tokenizer(folder / "tokenizer.json", num_letters=_NUM_LETTERS - 1)
        (folder / "ranks").mkdir()
        pool = RankPool(folder / "ranks", num_ranks=2)
        try:
            for index, layout in enumerate(layouts):
                yield _train(pool, folder, layout, job=f"job-{index}", num_steps=num_steps)
        finally:
            pool.close()


def _train(pool: RankPool, folder: Path, layout: DeviceLayout, *, job: str, num_steps: int) -> Row:
    plan = Plan(
        layout=layout,
        batch=BatchPlan(micro_batch_size=8, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep",) * _MODEL["num_hidden_layers"]),
    )
    workload = TrainingWorkload(
        sequence_length=64,
        global_batch_size=16,
        num_steps=num_steps,
        learning_rate=2e-3,
        warmup_steps=num_steps // 16,
        schedule="cosine",
        eval_batches=16,
        eval_every_steps=0,
        checkpoint_every_steps=0,
    )
    run = {"config": _MODEL, "plan": plan.to_json(), "workload": to_json(workload), "folder": str(folder), "job": job}
    replies = pool.run({"kind": "train", "run": run}, num_ranks=2, timeout_s=900.0)
    summary = replies[0]["answer"]["result"]["summary"]
    return {
        "what": "loss",
        "sync_every": layout.sync_every,
        "sync_format": layout.sync_format,
        "sync_rule": layout.sync_rule,
        "num_steps": num_steps,
        "validation_loss_start": summary["validation_loss_start"],
        "validation_loss": summary["validation_loss"],
    }


def _write_text(folder: Path) -> None:
    """The bundled text, a token for each byte."""
    folder.mkdir()
    letters = np.frombuffer(TEXT_FILE.read_bytes(), dtype=np.uint8).astype("<u2")
    (folder / TOKENS_FILE).write_bytes(letters.tobytes())
    manifest = TokenManifest(
        version=FORMAT_VERSION,
        dtype="uint16",
        num_tokens=len(letters),
        num_documents=1,
        vocab_size=_NUM_LETTERS,
        end_of_text_id=0,
        dataset_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        tokenizer="own",
        tokens_sha256=hashlib.sha256(letters.tobytes()).hexdigest(),
    )
    write_manifest(folder, manifest)


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Goals: times against predictions, how much shorter a step is, and the worst of the losses beside shared steps'."""
    times = [row for row in rows if row["what"] == "time" and "step_ms" in row]
    losses = [row for row in rows if row["what"] == "loss" and "validation_loss" in row]
    errors = [abs(row["step_error_percent"]) for row in times]
    worst = max(errors, default=None)
    shared_ms = next((row["step_ms"] for row in times if row["sync_every"] == 1), None)
    shortest = min((row["step_ms"] for row in times if row["sync_every"] > 1), default=None)
    ratio = None if shared_ms is None or shortest is None else shared_ms / shortest
    shared_loss = next((row["validation_loss"] for row in losses if row["sync_every"] == 1), None)
    eight = [row["validation_loss"] for row in losses if row["sync_every"] == _EVERY and row["sync_rule"] == "average"]
    lost = None if shared_loss is None or not eight else max(eight) / shared_loss
    return {
        f"step time over {_SLOW.name}, worst error, %": goal(
            worst, f"<= {_TIME_PERCENT:g}", met=worst is not None and worst <= _TIME_PERCENT
        ),
        "a shared step's time over that of the fastest of eight alone": goal(ratio, ">= 4", met=ratio is not None and ratio >= 4),
        "loss with eight steps alone and averaging over that of shared steps, worst format": goal(
            lost, f"<= {_LOSS_SHARE:g}", met=lost is not None and lost <= _LOSS_SHARE
        ),
    }
