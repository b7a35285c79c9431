"""One rank of ``network.py`` as a process: carries out steps and answers with their times and with what the kernel counted.

Reads commands as JSON lines, as ``tests/optimizer/runtime/ranks/rank_process.py`` does.
"""

import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from optimizer.base.serialize import from_json
from optimizer.hardware.probe.rates.peer_exchange import time_exchanges
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.ranks.group import RankPlace, Ranks
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload
from tests.optimizer.runtime.ranks.connections import count_interface_bytes, count_sent_bytes

_CPU: Final = torch.device("cpu")
_PROBE_S: Final = 1.0
_QUIET_S: Final = 0.3
"""Until acknowledgements of what came before are through, before counters are read."""


def carry_out(command: dict[str, Any], place: RankPlace) -> dict[str, Any]:
    """Steps of one case: what each took, how long it waited for the network, and the bytes of all together."""
    plan = Plan.from_json(command["plan"])
    workload = from_json(TrainingWorkload, command["workload"], path="workload")
    torch.manual_seed(5)
    model = build_prepared(read_model_spec(command["config"]), weights=plan.weights, workload=workload, device=_CPU)
    num_mine = plan.batch.accumulation_steps
    whole = replace(plan, batch=replace(plan.batch, accumulation_steps=num_mine * plan.layout.num_parts))
    first = 0 if plan.layout.is_cut else place.rank * num_mine
    batches = make_synthetic_batches(model, plan=whole, workload=workload)[first : first + num_mine]
    step_ms, network_ms = [], []
    with Ranks(place, device=_CPU) as ranks:
        trainer = Trainer(
            model,
            plan=plan,
            workload=workload,
            device=_CPU,
            meter=None,
            scratch=Path(command["folder"]),
            ranks=ranks if place.num_ranks > 1 else None,
        )
        try:
            trainer.step(batches, learning_rate=1e-4)
            ranks.barrier()
            time.sleep(_QUIET_S)
            before = count_sent_bytes(), count_interface_bytes(ranks.interface)
            for _ in range(command["num_steps"]):
                ranks.lanes.begin()
                begin_s = time.perf_counter()
                trainer.step(batches, learning_rate=1e-4)
                step_ms.append(1000 * (time.perf_counter() - begin_s))
                network_ms.append(ranks.lanes.take().busy_ms.get("network", 0.0))
            time.sleep(_QUIET_S)
            after = count_sent_bytes(), count_interface_bytes(ranks.interface)
        finally:
            trainer.close(keep_weights=False)
        ranks.barrier()
    return {
        "step_ms": step_ms,
        "network_ms": network_ms,
        "compute_ms": [step - network for step, network in zip(step_ms, network_ms, strict=True)],
        "sent_bytes": (after[0] - before[0]) / command["num_steps"],
        "interface_bytes": (after[1] - before[1]) / command["num_steps"],
    }


def _probe(place: RankPlace) -> dict[int, float]:
    """Seconds of all-reduces by bytes, measured as the probe of a machine does it."""
    with Ranks(place, device=_CPU) as ranks:
        return time_exchanges(ranks, device=_CPU, max_s=_PROBE_S)


def main() -> int:
    torch.set_num_threads(1)
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        given = command["place"]
        place = RankPlace(**{**given, "folder": Path(given["folder"])})
        answer: dict[str, Any]
        try:
            answer = {"answer": _probe(place) if command.get("probes") else carry_out(command, place)}
        except Exception:
            answer = {"fault": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
