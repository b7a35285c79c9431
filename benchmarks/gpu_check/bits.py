"""Every technique, pair of techniques and generation plan of the tests on one device, against keeping everything there.

    python -m benchmarks.gpu_check.bits [--quick] [--device cuda:0] [--json FILE]

Weights after three steps, and the tokens of a generation. All that the device computes is to give the same bits wherever things
are kept meanwhile. Where the host computes the update, or attends, a card's arithmetic is not the processor's: there the
distance is bounded, and on the CPU device, the hostile one too, it is to be nothing. An error in one plan is a row, and the next
plan still runs.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.common.packages import NEEDS_PACKAGE, missing_package
from benchmarks.common.record import GoalEntry, Record, Row, all_of, at_most, clear, describe_machine, failure, goal
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import FrozenFormat, WeightsDtype, WeightsPlace, WeightsPlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.device import check_dtype, prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.homes import HomeTensor
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import LOSSLESS, build, prompts_of
from tests.optimizer.techniques.plans import LLAMA, make_plan, make_workload
from tests.optimizer.techniques.test_pairs import list_cases

NUM_STEPS = 3
DEADLINE_S = 420.0
"""No new plan is begun after this."""
MOST_DISTANCE = 1e-5
"""Between weights of which one run's were updated by the host: a hundredth of the learning rate, which is an update's size."""
_LEARNING_RATE = 1e-3
_NUM_NEW_TOKENS = 6
_FROZEN: tuple[FrozenFormat, ...] = ("same", "int8", "int4", "nf4")
_AWAY: tuple[WeightsPlace, ...] = ("host", "disk")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan whose weights are to be those of another."""

    name: str
    plan: Plan
    plain: Plan
    """The same order of sums, everything kept."""
    workload: TrainingWorkload

    @property
    def is_updated_by_host(self) -> bool:
        return self.plan.optimizer_state.place != "device"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="techniques alone, and a third of the generations")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    record = Record(file=options.json, machine=describe_machine(device), is_quick=options.quick)
    measure(record, device, quick=options.quick)
    return record.finish(summarize(record.rows, is_card=device.type != "cpu"))


def measure(record: Record, device: torch.device, *, quick: bool) -> None:
    cases = [*list_techniques(quick=quick), *list_adapters()]
    generations = list_generations()[:: 3 if quick else 1]
    with prepared_device(device), tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        bench = _Bench(device, Path(folder))
        for index, case in enumerate(cases):
            if time.monotonic() - record.started_s > DEADLINE_S:
                record.add({"what": "left out", "why_not": "out of time", "num_plans": len(cases) - index})
                break
            if (package := missing_package(case.plan)) is not None:
                record.add({"what": NEEDS_PACKAGE, "name": case.name, "package": package})
                continue
            record.add_all(case.name, bench.rows_of_training(case))
        record.add_all("generations", bench.rows_of_generations(generations))


def list_techniques(*, quick: bool) -> list[Case]:
    """Each technique alone in both dtypes, and every pair of them in fp32."""
    found = []
    for (names,) in (given.values for given in list_cases()):
        if quick and len(names) > 1:
            continue
        dtypes: tuple[WeightsDtype, ...] = ("fp32", "bf16") if len(names) == 1 else ("fp32",)
        for dtype in dtypes:
            plan = make_plan(*names)
            plan = replace(plan, weights=replace(plan.weights, dtype=dtype))
            plain = replace(
                make_plan(), batch=plan.batch, logits_and_loss=plan.logits_and_loss, weights=WeightsPlan(dtype=dtype)
            )
            name = f"{' and '.join(names)}, {dtype}"
            found.append(Case(name=name, plan=plan, plain=plain, workload=make_workload(plan)))
    return found


def list_adapters() -> list[Case]:
    """Adapters over each format of frozen weights, which stream or whose blocks are rebuilt, against those that stay."""
    found = []
    for frozen in _FROZEN:
        plain = replace(make_plan(), weights=WeightsPlan(dtype="bf16", frozen=frozen))
        workload = replace(make_workload(plain), adapter=Adapter(rank=4))
        for place in _AWAY:
            plan = replace(plain, weights=replace(plain.weights, place=place))
            found.append(Case(name=f"adapters over {frozen} on {place}", plan=plan, plain=plain, workload=workload))
        rebuilt = replace(plain, activations=ActivationsPlan(per_block=("recompute", "offload", "recompute")))
        found.append(Case(name=f"adapters over {frozen}, rebuilt", plan=rebuilt, plain=plain, workload=workload))
    return found


def list_generations() -> list[GenerationPlan]:
    """Lossless plans of the tests but those that need a store on the network. Micro-batches follow one another where the package
    by which several share a pass is not installed.
    """
    plans = [plan for plan in LOSSLESS if plan.kv_cache.place != "remote"]
    return [plan if missing_package(plan) is None else replace(plan, num_micro_batches=1) for plan in plans]


class _Bench:
    def __init__(self, device: torch.device, scratch: Path) -> None:
        self._device = device
        self._scratch = scratch
        self._spec: ModelSpec = read_model_spec(LLAMA)
        self._plain_weights = cache(self.train)

    def rows_of_training(self, case: Case) -> Iterator[Row]:
        head = {"what": "training", "name": case.name, "by_host": case.is_updated_by_host}
        expected = self._plain_weights(case.plain, case.workload)
        found = self.train(case.plan, case.workload)
        distances = [float((found[name].double() - expected[name].double()).abs().max()) for name in expected]
        equal = all(torch.equal(found[name], expected[name]) for name in expected)
        yield {**head, "equal": equal and found.keys() == expected.keys(), "distance": max(distances)}

    def train(self, plan: Plan, workload: TrainingWorkload) -> dict[str, torch.Tensor]:
        """The trained weights after the steps, on the host."""
        check_dtype(plan.weights, self._device)
        model = build_prepared(self._spec, weights=plan.weights, workload=workload, device=self._device)
        meter = Meter(device=self._device)
        trainer = Trainer(model, plan=plan, workload=workload, device=self._device, meter=meter, scratch=self._scratch)
        try:
            batches = make_synthetic_batches(trainer.model, plan=plan, workload=workload)
            for _ in range(NUM_STEPS):
                trainer.step(batches, learning_rate=_LEARNING_RATE)
            trainer.join()
            return {name: _on_host(held) for name, held in trainer.named_weights().items()}
        finally:
            trainer.close()

    def rows_of_generations(self, plans: Sequence[GenerationPlan]) -> Iterator[Row]:
        """Two passes of each plan; whatever happens to one, the next one runs."""
        for name in ("llama", "mistral"):
            model = build({**SMALL_CONFIGS[name], "max_position_embeddings": 512})
            expected = self.generate(model, GenerationPlan(batch_size=2))
            for plan in plans:
                cache_plan = plan.kv_cache
                label = f"{name}, weights on {plan.weights.place}, cache on {cache_plan.place}, ahead {cache_plan.prefetch}"
                try:
                    tokens = self.generate(model, plan)
                except Exception as error:
                    yield failure(label, error)
                    clear()
                    continue
                by_host = cache_plan.attention == "host"
                share = float((tokens == expected).float().mean())
                yield {"what": "generation", "name": label, "by_host": by_host, "equal": share == 1.0, "equal_share": share}

    def generate(self, model: torch.nn.Module, plan: GenerationPlan) -> torch.Tensor:
        mine = copy.deepcopy(model)
        if plan.weights.place == "device":
            mine = mine.to(self._device)
        generator = Generator(mine, plan=plan, device=self._device, meter=Meter(device=self._device), scratch=self._scratch)
        try:
            prompts = prompts_of(14, 2 * plan.sequences_per_pass)[:4]
            return generator.generate(prompts, num_new_tokens=_NUM_NEW_TOKENS)
        finally:
            generator.close(keep_weights=False)


def _on_host(held: torch.Tensor | HomeTensor) -> torch.Tensor:
    return (held.load() if isinstance(held, HomeTensor) else held.detach()).cpu().clone()


def summarize(rows: Sequence[Row], *, is_card: bool) -> dict[str, GoalEntry]:
    """is_card: what the host computes need not be the device's bits."""
    ran = [row for row in rows if row["what"] in ("training", "generation")]
    exact = [row["equal"] for row in ran if not (is_card and row["by_host"])]
    num_missing = sum(row["what"] in ("failed", "left out") for row in rows)
    goals = {
        "plans that failed or were left out": goal(num_missing, 0, met=num_missing == 0),
        "the bits of keeping everything": all_of(exact),
    }
    near = [row["distance"] for row in ran if is_card and row["what"] == "training" and row["by_host"]]
    if near:
        goals["distance of weights that the host updated"] = at_most(max(near), MOST_DISTANCE)
    return goals


if __name__ == "__main__":
    sys.exit(main())
