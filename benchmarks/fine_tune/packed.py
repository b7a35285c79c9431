"""Packed chats beside padded ones: the loss of each document, and the tokens learnt from in a second.

*Documents*: several chats in a row, each one's loss in it against its loss in a row of its own, by the step's own code, for
each model type. *Speed*: the bundled chat model on chats whose mean length is a quarter of the longest, joined of the bundled
ones; steps of as many rows, one chat in each or as many as fit, taken in turn. Tokens are those of chats; padding counts for
nothing.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, at_most, clear, goal
from benchmarks.fine_tune.chats import TYPES, Chat, make_spec, read_chats, tokenize_chats
from optimizer.data.batches import IGNORED_LABEL
from optimizer.data.samples.rows import SampleRows, open_batches
from optimizer.data.token_file import TokenFile
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.bundled import CHAT_MODEL_FOLDER
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.runtime.step.batch import BatchReader
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Packing, TrainingWorkload

NAME = "packed"
LIMIT = 1e-5
SPEED_GOAL = 3.0
TURNS = (1, 1, 1, 2, 1, 1, 3, 1, 1, 2, 1, 6)
"""Exchanges in each conversation, in turn: the longest is then about four times the mean."""
MICRO_BATCH = 8
KEPT: tuple[BlockChoice, ...] = ("keep",)
CPU = torch.device("cpu")


def measure_packed(options: Options) -> Iterator[Row]:
    """A row for each model type and one for the speed. ``--of``: types, or ``speed``."""
    with tempfile.TemporaryDirectory(prefix="headroom-packed-") as folder:
        tokens = tokenize_chats(read_chats(60), Path(folder))
        for model_type in TYPES[:2] if options.quick else TYPES:
            if options.wants(model_type):
                differences = list(_document_differences(make_spec(model_type), tokens, seed=options.seed))
                yield {
                    "part": NAME,
                    "case": model_type,
                    "num_documents": len(differences),
                    "largest_difference": max(differences),
                }
                clear()
    if options.wants("speed"):
        with tempfile.TemporaryDirectory(prefix="headroom-packed-") as folder:
            yield {"part": NAME, "case": "speed", **_speed(Path(folder), options)}


# Losses.


def _document_differences(spec: ModelSpec, tokens: TokenFile, *, seed: int) -> Iterator[float]:
    """For each document of the first step's packed rows: how far its loss there is from its loss alone."""
    packed, alone = _workload("best_fit", seed=seed), _workload("off", seed=seed)
    rows = open_batches(tokens, packed)
    assert isinstance(rows, SampleRows)
    ids, labels, positions = (torch.from_numpy(array) for array in rows.train_batch(0, 0, MICRO_BATCH, 1))
    model = build_model(spec, seed=seed)
    for place in range(len(ids)):
        for start, end in _documents(positions[place], labels[place]):
            only = torch.full_like(labels[place : place + 1], IGNORED_LABEL)
            only[0, start:end] = labels[place, start:end]
            in_row = _loss(model, packed, (ids[place : place + 1], only, positions[place : place + 1]))
            by_itself = _loss(model, alone, (ids[place : place + 1, start:end], only[:, start:end]))
            yield abs(in_row - by_itself)


def _documents(positions: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First and last place of each; what holds nothing to learn is padding."""
    starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
    for start, end in itertools.pairwise(starts):
        if bool((labels[start:end] != IGNORED_LABEL).any()):
            yield start, end


@torch.no_grad()
def _loss(model: torch.nn.Module, workload: TrainingWorkload, micro_batch: MicroBatch) -> float:
    trainer = Trainer(model, plan=_plan(len(find_blocks(model)), MICRO_BATCH), workload=workload, device=CPU, meter=None)
    try:
        return float(trainer.forward.loss_of(micro_batch))
    finally:
        trainer.close()


# Speed.


def _speed(folder: Path, options: Options) -> Row:
    chats = _join(read_chats(600))
    tokens = tokenize_chats(chats, folder)
    lengths = np.diff(tokens.starts())
    spec = read_model_spec(json.loads((CHAT_MODEL_FOLDER / "config.json").read_text()))
    packings: tuple[Packing, Packing] = ("off", "best_fit")
    runs = [_Run(spec, tokens, _workload(packing, length=int(lengths.max()) - 1, seed=options.seed)) for packing in packings]
    try:
        for step in range(4 if options.quick else 16):
            for run in runs if step % 2 else reversed(runs):
                run.step(step)
    finally:
        for run in runs:
            run.close()
    padded, packed = runs
    return {
        "num_chats": len(chats),
        "longest_tokens": int(lengths.max()),
        "longest_over_mean": round(float(lengths.max() / lengths.mean()), 3),
        "padded_tokens_per_s": round(padded.tokens_per_s, 1),
        "packed_tokens_per_s": round(packed.tokens_per_s, 1),
        "padded_step_ms": round(statistics.median(padded.steps_ms), 1),
        "packed_step_ms": round(statistics.median(packed.steps_ms), 1),
        "packed_over_padded": round(packed.tokens_per_s / padded.tokens_per_s, 3),
    }


def _join(chats: Sequence[Chat]) -> list[Chat]:
    """Conversations of as many exchanges as ``TURNS`` says, in the order of the chats."""
    exchanges = [chat["messages"][at : at + 2] for chat in chats for at in range(0, len(chat["messages"]), 2)]
    joined: list[Chat] = []
    at = 0
    while at < len(exchanges):
        num_turns = TURNS[len(joined) % len(TURNS)]
        joined.append({"messages": [message for exchange in exchanges[at : at + num_turns] for message in exchange]})
        at += num_turns
    return joined


class _Run:
    """A model that trains on packed or on padded rows; its first step is not timed."""

    def __init__(self, spec: ModelSpec, tokens: TokenFile, workload: TrainingWorkload) -> None:
        model = build_model(spec, seed=workload.seed)
        plan = _plan(spec.num_blocks, MICRO_BATCH)
        rows = open_batches(tokens, workload)
        assert isinstance(rows, SampleRows)
        self._lengths = np.diff(tokens.starts()) - 1
        self._rows = rows
        self._workload = workload
        self._reader = BatchReader(rows, plan=plan.batch, num_steps=workload.num_steps, device=CPU)
        self._trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=None)
        self.steps_ms: list[float] = []
        self._num_tokens = 0

    def step(self, step: int) -> None:
        micro_batches = self._reader.read(step)
        start_s = time.perf_counter()
        self._trainer.step(micro_batches, learning_rate=1e-4)
        if step > 0:
            self.steps_ms.append((time.perf_counter() - start_s) * 1000)
            indices = self._rows.train_sequence_indices(step, self._workload.global_batch_size)
            samples = [sample for index in indices.tolist() for sample in self._rows.samples_of_row(index)]
            self._num_tokens += int(self._lengths[samples].sum())

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / sum(self.steps_ms) * 1000

    def close(self) -> None:
        self._reader.close()
        self._trainer.close()


def _workload(packing: Packing, *, length: int = 256, seed: int) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=length, packing=packing, loss_on="assistant", global_batch_size=MICRO_BATCH, seed=seed
    )


def _plan(num_blocks: int, micro_batch_size: int) -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=1),
        activations=ActivationsPlan(per_block=KEPT * num_blocks),
    )


def summarize_packed(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    compared = [row for row in rows if "largest_difference" in row]
    worst = max((row["largest_difference"] for row in compared), default=None)
    speed = next((row for row in rows if row.get("case") == "speed"), None)
    ratio = None if speed is None else speed["packed_over_padded"]
    return {
        "largest difference of a document's loss in a packed row from its loss alone": at_most(worst, LIMIT),
        "model types whose documents were compared": goal(
            len(compared) or None, f">= {len(TYPES)}", met=len(compared) >= len(TYPES), needs="all cases"
        ),
        "chats' tokens per second, packed over padded": goal(
            ratio, f">= {SPEED_GOAL}", met=ratio is not None and ratio >= SPEED_GOAL, needs="full size"
        ),
    }


PART = Part(name=NAME, measure=measure_packed, summarize=summarize_packed, case="case")
