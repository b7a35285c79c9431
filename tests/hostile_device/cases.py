"""Training and generation plans that are run on the plain CPU device and on the hostile one, to the same bits.

The plans are those of the suites of techniques and of generation; beside them what only these reach: several pieces of an update,
several slabs of a store's trip, compressed trips, frozen weights that stream, state in 8 bits, loss scaling, evaluation.
"""

import dataclasses
import functools
import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from optimizer.formats.transfer_sizes import NUM_SLABS_EACH_WAY
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step import host_update
from optimizer.runtime.tiers import homes, host_memory, tiers, transfers
from optimizer.workload import Adapter, TrainingWorkload
from tests.hostile_device import trips
from tests.hostile_device.backend import hostile_device
from tests.hostile_device.streams import Schedule
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import LOSSLESS, build, prompts_of
from tests.optimizer.runtime.states import make_trainer, read
from tests.optimizer.runtime.step.test_step import PLACES
from tests.optimizer.runtime.tiny import make_plan as make_tiny_plan
from tests.optimizer.runtime.tiny import make_spec
from tests.optimizer.techniques.plans import LLAMA, make_plan, make_workload
from tests.optimizer.techniques.test_pairs import list_cases as list_pairs

MIXED = ("offload", "recompute", "offload_disk")
SMALL_PIECE_ELEMENTS = 8192
NUM_STEPS = 3
NUM_NEW = 6
"""Tokens of each sequence."""
SCHEDULES: tuple[Schedule, ...] = ("late", "early", "random")


@dataclasses.dataclass(frozen=True)
class Case:
    """A run whose result is to be the same on both devices."""

    name: str
    run: Callable[[Path], Any]
    """Given a folder for scratch; returns what is compared."""

    @functools.cached_property
    def expected(self) -> Any:
        """The result on the plain CPU device."""
        return self._run()

    def on_hostile_device(self, *, schedule: Schedule, seed: int = 0) -> Any:
        with hostile_device(schedule=schedule, seed=seed):
            return self._run()

    def _run(self) -> Any:
        torch.manual_seed(5)
        with tempfile.TemporaryDirectory(prefix="headroom-hostile-") as folder:
            return self.run(Path(folder))


@contextmanager
def small_pieces() -> Iterator[None]:
    """Updates in pieces and trips in slabs, as large tensors have them."""
    slab_bytes = 16 * 1024
    staging_bytes = 2 * NUM_SLABS_EACH_WAY * slab_bytes
    with (
        patch.object(homes, "PIECE_ELEMENTS", SMALL_PIECE_ELEMENTS),
        patch.object(host_update, "PIECE_ELEMENTS", SMALL_PIECE_ELEMENTS),
        patch.object(transfers, "SLAB_BYTES", slab_bytes),
        patch.object(host_memory, "SLAB_BYTES", slab_bytes),
        patch.object(tiers, "STAGING_BYTES", staging_bytes),
    ):
        yield


# Training.


def train_plan(plan: Plan, workload: TrainingWorkload, scratch: Path, *, num_steps: int = NUM_STEPS) -> Any:
    """The hash of the weights after some steps of the techniques' model."""
    spec = read_model_spec(LLAMA)
    return measure_step(
        spec, plan=plan, workload=workload, scratch=scratch, num_steps=num_steps, with_weights_hash=True
    ).weights_sha256


def train_tiny(
    name: str,
    plan: Plan,
    scratch: Path,
    *,
    pieces: bool = False,
    adapter: Adapter | None = None,
    num_steps: int = NUM_STEPS,
    **workload: Any,
) -> Any:
    """Losses, norms, an evaluation, weights and state, of some steps that nobody waits between."""
    model = None
    if adapter is not None:
        given = dataclasses.replace(make_workload(plan), adapter=adapter)
        model = build_prepared(make_spec(name), weights=plan.weights, workload=given, device=torch.device("cpu"))
        workload["adapter"] = adapter
    with small_pieces() if pieces else nullcontext():
        trainer = make_trainer(name, plan=plan, scratch=scratch, model=model, **workload)
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        try:
            results = [trainer.step(batches, learning_rate=1e-3 * (index + 1)) for index in range(num_steps)]
            validation_loss = trainer.evaluate(batches)
            weights = _hash({name: read(held) for name, held in trainer.named_weights().items()})
            state = _hash({name: read(held) for name, held in trainer.optimizer.export_state()[0].items()})
        finally:
            trainer.close()
    closed = _hash({name: tensor for name, tensor in trainer.model.named_parameters() if tensor.requires_grad})
    return [(result.loss, result.grad_norm) for result in results], validation_loss, weights, state, closed


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def list_technique_cases(*, num_pairs: int | None = None, seed: int = 0, num_steps: int = NUM_STEPS) -> list[Case]:
    """Each technique alone, and pairs of them: all, or so many drawn."""
    names = [tuple(given.values[0]) for given in list_pairs()]
    alone = [each for each in names if len(each) == 1]
    pairs = [each for each in names if len(each) == 2]
    if num_pairs is not None:
        pairs = random.Random(seed).sample(pairs, num_pairs)
    return [
        Case(" and ".join(each), functools.partial(train_plan, plan, make_workload(plan), num_steps=num_steps))
        for each in (*alone, *pairs)
        for plan in (make_plan(*each),)
    ]


def list_training_cases(*, num_steps: int = NUM_STEPS) -> list[Case]:
    """List training that techniques and pairs do not reach."""
    train = functools.partial(train_tiny, num_steps=num_steps)
    cases: dict[str, Callable[[Path], Any]] = {
        f"{name} {clip or 'unclipped'}": functools.partial(
            train, "llama", make_tiny_plan(*MIXED, accumulation_steps=2, **places), max_grad_norm=clip
        )
        for name, places in PLACES.items()
        for clip in (1.0, None)
    }
    for dtype in ("bf16", "fp16"):
        for name in ("state on the host", "all on the disk", "moments on the disk"):
            plan = make_tiny_plan(*MIXED, dtype=dtype, accumulation_steps=2, **PLACES[name])
            cases[f"{name} {dtype}"] = functools.partial(train, "llama", plan, max_grad_norm=None)
    for compress in ("bf16", "int8"):
        for name in ("llama", "gpt2"):
            plan = make_tiny_plan(*MIXED, accumulation_steps=2)
            plan = dataclasses.replace(plan, activations=dataclasses.replace(plan.activations, compress=compress))
            cases[f"compressed {compress} {name}"] = functools.partial(train, name, plan)
    for name in ("all on the host", "all on the disk", "state on the disk"):
        plan = make_tiny_plan(*MIXED, accumulation_steps=2, **PLACES[name])
        cases[f"{name} in pieces"] = functools.partial(train, "llama", plan, pieces=True, max_grad_norm=None)
    plan = make_tiny_plan(dtype="bf16", **PLACES["all on the disk"])
    cases["all on the disk bf16 in pieces"] = functools.partial(train, "llama", plan, pieces=True)
    for frozen in ("same", "int8"):
        for place in ("host", "disk"):
            plan = dataclasses.replace(make_tiny_plan(*MIXED), weights=WeightsPlan(frozen=frozen, place=place))
            adapter = Adapter(rank=4)
            cases[f"adapters over {frozen} on {place}"] = functools.partial(train, "llama", plan, adapter=adapter)
    for optimizer in ("sgd", "lion"):
        plan = make_tiny_plan(*MIXED, **PLACES["half the state on the host"])
        cases[optimizer] = functools.partial(train, "llama", plan, optimizer=optimizer)
    plan = dataclasses.replace(make_plan("offload", "gradients on host"), optimizer_state=OptimizerStatePlan(bits=8))
    cases["8-bit state"] = functools.partial(train_plan, plan, make_workload(plan), num_steps=num_steps)
    plan = make_plan("state on host", "offload")
    plan = dataclasses.replace(plan, weights=WeightsPlan(dtype="bf16", master="none"))
    cases["no masters"] = functools.partial(train_plan, plan, make_workload(plan), num_steps=num_steps)
    return [Case(name, run) for name, run in cases.items()]


# Generation.


def generate(config: dict[str, Any], plan: GenerationPlan, scratch: Path, *, length: int = 14, num_new: int = NUM_NEW) -> Any:
    """The tokens of two passes, with a meter."""
    generator = Generator(
        build(config), plan=plan, device=torch.device("cpu"), meter=Meter(device=torch.device("cpu")), scratch=scratch
    )
    try:
        return generator.generate(prompts_of(length, 2 * plan.sequences_per_pass), num_new_tokens=num_new).tolist()
    finally:
        generator.close()


def list_generation_cases(*, num_new: int = NUM_NEW) -> list[Case]:
    """Lossless plans of the suite, and packed caches; those on a remote store have tests of their own."""
    plans = [
        ("llama" if turn % 2 else "mistral", plan, 14)
        for turn, plan in enumerate(LOSSLESS)
        if plan.kv_cache.place != "remote"
    ]
    plans += [
        ("llama", GenerationPlan(batch_size=2, kv_cache=KvCachePlan(dtype=dtype, place=place)), 126)
        for dtype in ("int8", "int4")
        for place in ("device", "host", "disk")
    ]
    plans += [
        ("opt", GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place=place, prefix_tokens=8)), 14)
        for place in ("host", "disk")
    ]
    plans.append(("mixtral", GenerationPlan(batch_size=2, weights=WeightsPlan(frozen="int8", place="host")), 14))
    return [
        Case(
            f"{index} {name} {plan.kv_cache.dtype} on {plan.kv_cache.place}, weights on {plan.weights.place}",
            functools.partial(generate, _longer(SMALL_CONFIGS[name]), plan, length=length, num_new=num_new),
        )
        for index, (name, plan, length) in enumerate(plans)
    ]


def _longer(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "max_position_embeddings": 512}


# Trips.


def list_trip_cases() -> list[Case]:
    cases: dict[str, Callable[[Path], Any]] = {
        f"trip to the {place} {compress}": functools.partial(trips.offload_and_fetch, place=place, compress=compress)
        for place in ("host", "disk")
        for compress in ("none", "bf16", "int8")
    }
    cases["trip in many slabs"] = trips.many_slabs
    cases["trip of ranges"] = trips.copies_of_ranges
    cases["trip of ranges in order with compute"] = functools.partial(trips.copies_of_ranges, beside=False)
    cases["trip of forgotten sources"] = trips.sources_that_nobody_waits_for
    cases["trip into unused memory"] = trips.into_memory_that_nothing_uses
    cases["trip through a store"] = trips.save_and_load
    cases["trips over one range of a store"] = trips.small_saves_and_loads
    cases["trip of the host's own ranges"] = trips.ranges_of_the_host
    cases["trip that ends the tiers"] = trips.close_with_copies_under_way
    return [Case(name, run) for name, run in cases.items()]


def list_all_cases(*, num_steps: int = NUM_STEPS, num_new: int = NUM_NEW) -> list[Case]:
    return [
        *list_trip_cases(),
        *list_technique_cases(num_steps=num_steps),
        *list_training_cases(num_steps=num_steps),
        *list_generation_cases(num_new=num_new),
    ]


QUICK = (
    "state on host",
    "half the state on the host unclipped",
    "all on the disk in pieces",
    "all on the host in pieces",
    "all on the disk bf16 in pieces",
    "state on the disk in pieces",
    "compressed int8 llama",
    "moments on the disk bf16",
    "adapters over same on disk",
    "offload and offload_disk",
    "offload and consume",
    "1 llama same on host, weights on device",
    "14 mistral same on disk, weights on disk",
    "8 mistral same on host, weights on host",
    "15 mistral same on host, weights on device",
    "19 llama int8 on host, weights on device",
    "23 llama int4 on disk, weights on device",
    "24 opt same on host, weights on device",
    "25 opt same on disk, weights on device",
)
"""Cases that reach every wait of the runtime, for the program that takes them out one by one."""


def list_quick_cases() -> list[Case]:
    by_name = {case.name: case for case in list_all_cases()}
    return [*list_trip_cases(), *(by_name[name] for name in QUICK)]
