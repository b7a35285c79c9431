"""Holds what ranks are predicted to exchange against the kernel's counters and the clock, over links of three kinds.

Each rank has a network namespace of its own (``links/``); a relay gives the links between them a rate and a delay. Bytes: those
of TCP's own counters of each rank's connections against the plan's, and those of the interface, with headers, where frames have
the size that a cable has. Times: the median step against what the plan says of the network beside the compute that the same
steps took; compute is not what is held here, and this machine's cores are shared. Where namespaces may not be made the record
says so as a failure, and bytes are held over the loopback.

Ranks and relay run at real-time priority, so that waiting for a core that others use does not become part of the links.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.record import GoalEntry, Row, failure, goal
from benchmarks.parallel.links.namespaces import (
    INTERFACE,
    PROFILES,
    SMALL_FRAMES,
    LinkProfile,
    NoNamespaces,
    joined_namespaces,
)
from optimizer.base.serialize import to_json
from optimizer.estimate.categories.network import (
    Network,
    estimate_framed_bytes,
    estimate_sent_bytes,
    estimate_staged_bytes,
)
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import LOOPBACK, network_link
from optimizer.hardware.probe.rates.peers import measured_link
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DataParallel, DeviceLayout
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.pool import RankPool

_BYTES_PERCENT: Final = 2.0
_TIME_PERCENT: Final = 15.0
_SEQUENCE_LENGTH: Final = 16
_STEPS_NEAR, _STEPS_FAR = 10, 2
"""Steps of a round that are timed; those over slow links take seconds."""
_ROUNDS: Final = 2
_MODULE: Final = "benchmarks.parallel.network_rank"
_LAYOUTS: Final[tuple[tuple[DataParallel, int], ...]] = (("replicated", 1), ("zero1", 1), ("zero2", 2))
"""Ways to share state, each with the micro-batches of a rank in a step."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model that is trained: what crosses the links decides, so compute is kept small."""

    name: str
    hidden_size: int
    vocab_size: int
    is_tied: bool = True
    """False for a model that can be cut while all of it is trained."""

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "headroom_decoder",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": 2,
            "vocab_size": self.vocab_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "attention_block": 8,
            **({} if self.is_tied else {"tie_word_embeddings": False}),
        }


SHAPES: Final = (Shape(name="small", hidden_size=64, vocab_size=512), Shape(name="wide", hidden_size=320, vocab_size=4096))
"""Latency decides the first's exchanges, the rate the second's: its largest tensors are of 5 MiB."""
CUT: Final = Shape(name="small and untied", hidden_size=64, vocab_size=512, is_tied=False)
_CUT_LENGTH, _CUT_MICRO_BATCHES = 64, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model shared in one way."""

    shape: Shape
    plan: Plan
    workload: TrainingWorkload

    @property
    def name(self) -> str:
        layout = self.plan.layout
        return f"{self.shape.name}, {layout.num_devices} ranks, {'cut' if layout.is_cut else layout.data}"


def make_cases(num_ranks: int, shapes: Sequence[Shape]) -> list[Case]:
    return [
        Case(
            shape=shape,
            plan=Plan(
                layout=DeviceLayout(num_devices=num_ranks, data=data),
                batch=BatchPlan(micro_batch_size=1, accumulation_steps=num_micro_batches),
                activations=ActivationsPlan(per_block=("keep", "keep")),
            ),
            workload=TrainingWorkload(
                sequence_length=_SEQUENCE_LENGTH, global_batch_size=num_ranks * num_micro_batches, num_steps=1
            ),
        )
        for shape in shapes
        for data, num_micro_batches in _LAYOUTS
    ]


def make_cut(num_micro_batches: int) -> Case:
    """A block on each of two ranks, and hidden states between them."""
    return Case(
        shape=CUT,
        plan=Plan(
            layout=DeviceLayout(num_devices=2, stage_blocks=(1, 1)),
            batch=BatchPlan(micro_batch_size=1, accumulation_steps=num_micro_batches),
            activations=ActivationsPlan(per_block=("keep", "keep")),
        ),
        workload=TrainingWorkload(sequence_length=_CUT_LENGTH, global_batch_size=num_micro_batches, num_steps=1),
    )


def find_link(profile: LinkProfile | None, pool: RankPool, num_ranks: int) -> PeerLink:
    """The link as the planner is given it: its rate and delay, or on one machine what the probe finds."""
    if profile is not None and profile.bytes_per_s is not None:
        return network_link(bits_per_s=8 * profile.bytes_per_s, delay_s=profile.delay_s)
    replies = pool.run({"probes": True}, num_ranks=num_ranks)
    seconds = {int(size): took_s for size, took_s in replies[0]["answer"].items()}
    return measured_link(seconds, LOOPBACK, num_ranks=num_ranks, is_gloo=True)


def measure_all(*, is_quick: bool) -> Iterator[Row]:
    """Every case over every link; a failure for links that cannot be made."""
    shapes = SHAPES[:1] if is_quick else SHAPES
    profiles = (PROFILES[1], SMALL_FRAMES) if is_quick else (*PROFILES, SMALL_FRAMES)
    cut = make_cut(_CUT_MICRO_BATCHES)
    profiled = {shape.name: make_profile(shape, make_cases(2, [shape])) for shape in shapes}
    profiled[CUT.name] = make_profile(CUT, [cut])
    for num_ranks in (2,) if is_quick else (2, 3, 4):
        cases = make_cases(num_ranks, shapes) + [cut] * (num_ranks == 2)
        for profile in profiles:
            try:
                yield from _measure(cases, profile, profiled, num_rounds=1 if is_quick else _ROUNDS)
            except NoNamespaces as error:
                yield failure(f"{num_ranks} ranks, {profile.name}", error)
                yield from _measure(cases, None, profiled, num_rounds=1)
                break
            except Exception as error:
                yield failure(f"{num_ranks} ranks, {profile.name}", error)


def make_profile(shape: Shape, cases: Sequence[Case]) -> Profile:
    extent = extent_of([(case.plan, case.workload) for case in cases])
    return trace(read_model_spec(shape.config), extent=extent)


def _measure(
    cases: Sequence[Case], profile: LinkProfile | None, profiles: dict[str, Profile], *, num_rounds: int
) -> Iterator[Row]:
    """The cases in turn, round after round. profile: None for the loopback."""
    num_ranks = cases[0].plan.layout.num_devices
    found: dict[str, list[list[dict[str, Any]]]] = {case.name: [] for case in cases}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = start_ranks(stack, folder, num_ranks, profile)
        link = find_link(profile, pool, num_ranks)
        for _ in range(num_rounds):
            for case in cases:
                command = {
                    "plan": case.plan.to_json(),
                    "workload": to_json(case.workload),
                    "config": case.shape.config,
                    "folder": str(folder),
                    "num_steps": _STEPS_FAR if profile is not None and profile.bytes_per_s else _STEPS_NEAR,
                }
                replies = pool.run(command, num_ranks=num_ranks, timeout_s=120.0)
                broken = [reply for reply in replies if "answer" not in reply]
                if broken:
                    raise RuntimeError(f"{case.name}: {broken[0].get('fault', broken[0])}")
                found[case.name].append([reply["answer"] for reply in replies])
    for case in cases:
        machine = replace(make_cpu_machine(), num_threads=num_ranks, num_devices=num_ranks, peers=link)
        compared = _compare(case, found[case.name], profiles[case.shape.name], machine)
        yield {
            "what": "case",
            "name": case.name,
            "link": "loopback" if profile is None else profile.name,
            "has_small_frames": profile is not None and profile.has_small_frames,
            "link_bytes_per_s": link.bytes_per_s,
            "link_latency_s": link.latency_s,
            **compared,
        }


def start_ranks(stack: ExitStack, folder: Path, num_ranks: int, profile: LinkProfile | None) -> RankPool:
    if profile is None:
        pool = RankPool(folder, num_ranks=num_ranks, module=_MODULE)
    else:
        spaces = stack.enter_context(joined_namespaces(num_ranks, profile))
        pool = RankPool(
            folder,
            num_ranks=num_ranks,
            module=_MODULE,
            prefix=lambda rank: [*spaces.prefix(rank), "chrt", "--rr", "1"],
            environment={"HEADROOM_RANK_INTERFACE": INTERFACE},
        )
    stack.callback(pool.close)
    return pool


def _compare(case: Case, rounds: Sequence[Sequence[dict[str, Any]]], profile: Profile, machine: Machine) -> Row:
    """rounds: each with an answer of every rank."""
    predicted = estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine)
    exchange_ms = predicted.lane_busy_ms["network"]
    sent, framed = _predict_bytes(case, profile, machine)
    by_rank = list(zip(*rounds, strict=True))
    measured = [statistics.median(answer["sent_bytes"] for answer in answers) for answers in by_rank]
    on_interface = [statistics.median(answer["interface_bytes"] for answer in answers) for answers in by_rank]
    steps = [max(times) for answers in rounds for times in zip(*(answer["step_ms"] for answer in answers), strict=True)]
    alone_ms = statistics.median(one_ms for answers in rounds for answer in answers for one_ms in answer["compute_ms"])
    # More ranks than cores compute in turn, while the others count as waiting for the network.
    compute_ms = alone_ms * max(1.0, case.plan.layout.num_devices / (os.cpu_count() or 1))
    step_ms = statistics.median(steps)
    return {
        "num_ranks": case.plan.layout.num_devices,
        "layout": "cut" if case.plan.layout.is_cut else case.plan.layout.data,
        "predicted_sent_bytes": list(sent),
        "measured_sent_bytes": [round(number) for number in measured],
        "sent_error_percent": _worst_percent(sent, measured),
        "predicted_frames_bytes": list(framed),
        "interface_bytes": [round(number) for number in on_interface],
        **({"frames_error_percent": _worst_percent(framed, on_interface)} if framed else {}),
        "predicted_network_ms": exchange_ms,
        "compute_ms": compute_ms,
        "step_ms": step_ms,
        "step_error_percent": 100 * ((exchange_ms + compute_ms) / step_ms - 1),
        "all_step_ms": steps,
    }


def _predict_bytes(case: Case, profile: Profile, machine: Machine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By rank: bytes given to connections, and bytes of the frames that carry them."""
    network = Network.of(machine, case.plan.layout)
    assert network is not None
    sizes = list_tensors(profile).num_elements
    if case.plan.layout.is_cut:
        hidden_bytes = 4 * _CUT_LENGTH * case.shape.hidden_size
        sent = estimate_staged_bytes(
            network,
            len(sizes),
            ranks=case.plan.layout.rank_stages,
            hidden_bytes=hidden_bytes,
            num_micro_batches=case.plan.batch.accumulation_steps,
        )
        return sent, ()
    return estimate_sent_bytes(network, sizes, case.plan), estimate_framed_bytes(network, sizes, case.plan)


def _worst_percent(predicted: Sequence[float], measured: Sequence[float]) -> float:
    errors = [100 * (said / found - 1) for said, found in zip(predicted, measured, strict=True)]
    return max(errors, key=abs)


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Goals: bytes by rank against both counters, and step times by link."""
    cases = [row for row in rows if row["what"] == "case" and "sent_error_percent" in row]
    sent = [abs(row["sent_error_percent"]) for row in cases]
    framed = [abs(row["frames_error_percent"]) for row in cases if row["has_small_frames"] and "frames_error_percent" in row]
    goals = {
        "bytes of a rank's connections, worst error, %": _at_most(sent, _BYTES_PERCENT),
        "bytes of a rank's interface in frames of 1500 bytes, worst error, %": _at_most(framed, _BYTES_PERCENT),
    }
    for profile in PROFILES:
        errors = sorted(abs(row["step_error_percent"]) for row in cases if row["link"] == profile.name)
        name = f"step time over {profile.name}, worst error, %"
        goals[name] = _at_most(errors, _TIME_PERCENT)
        goals[f"step time over {profile.name}, median error, %"] = _at_most(errors[len(errors) // 2 :][:1], _TIME_PERCENT)
    return goals


def _at_most(values: Sequence[float], limit: float) -> GoalEntry:
    worst = max(values, default=None)
    return goal(worst, f"<= {limit:g}", met=worst is not None and worst <= limit)
