"""One rank as a process, which ``pool.py`` starts: reads commands as JSON lines and answers each with one.

``steps``  carries out a ``RankCase`` and answers with what it measured; weights and state go to files in the command's folder.
           ``spoils``: ``[rank, step]`` where a gradient is infinite; ``detaches``: where a weight has no gradient;
           ``lags``: ``[rank, what]``, the one that is late to ``fetch`` each block's weights, or with its ``update``.
           ``counts``: whether the bytes that each step sends are counted.
``group``  uses each method of ``Ranks`` once.
``homes``  makes homes of the sizes given for each rank, touches their bytes, and holds them for ``holds_s``.
``generate`` runs requests under a plan of several devices (``generate_requests``).
``train``  carries out a job (``optimizer/runtime/job/train.py``). ``stops_before_step``, ``dies_before_step`` and
           ``hangs_before_step`` count its steps from 1; ``ranks_only`` says on which ranks it dies or hangs.
"""

import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from optimizer.base.errors import HeadroomError
from optimizer.base.serialize import from_json, to_json
from optimizer.formats.sampling import Sampling
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.runtime.generation.run_requests import Request, open_generator, run_requests
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.ranks.group import RankPlace, Ranks
from optimizer.runtime.ranks.shared_homes import SharedHomes
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.workload import TrainingWorkload, deal_sequences
from tests.optimizer.runtime.ranks.cases import NUM_STEPS, RankCase
from tests.optimizer.runtime.ranks.connections import count_settled_bytes

CPU = torch.device("cpu")
LEARNING_RATE = 2e-4
"""In the first step; twice and three times as much in the next two."""
LAG_S = 0.05
"""Long beside a step of the small models."""


def carry_out_steps(
    case: RankCase,
    *,
    ranks: Ranks | None,
    folder: Path,
    spoils: Sequence[int] = (),
    detaches: Sequence[int] = (),
    lags: Sequence[Any] = (),
    counts: bool = False,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Steps, an evaluation, and what they left; without ``ranks`` the case of one device. counts: what each step sends."""
    rank = 0 if ranks is None else ranks.rank
    # What a case before this one held in circles is still mapped.
    gc.collect()
    torch.manual_seed(5)
    meter = Meter(device=CPU)
    model = case.make_model(rank=rank)
    trainer = Trainer(
        model, plan=case.plan, workload=case.workload, device=CPU, meter=meter, scratch=folder, ranks=ranks
    )
    losses, norms, rewards, peaks, host_peaks, left_out = [], [], [], [], [], []
    faults = _Faults(model)
    sent: list[int] = []
    if lags and lags[0] == rank:
        _lag(trainer, lags[1])
    try:
        for step in range(num_steps):
            faults.are_infinite = [rank, step] == list(spoils)
            faults.are_detached = [rank, step] == list(detaches)
            batches = case.make_batches(model, step=step, rank=rank)
            sent += [count_settled_bytes()] * counts
            result = trainer.step(batches, learning_rate=LEARNING_RATE * (step + 1))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            rewards.append(to_json(result.rewards))
            peaks.append(meter.peak().device_bytes)
            host_peaks.append(meter.peak().host_bytes)
            left_out.append(result.is_left_out)
        sent += [count_settled_bytes()] * counts
        peak = meter.peak()
        batches = []
        meter.reset_peak()
        validation_loss = trainer.evaluate(case.make_batches(model, step=99, rank=rank))
        evaluation_peak = meter.peak().device_bytes
        trainer.join()
        weights = {name: _read(held) for name, held in trainer.named_weights().items()}
        exported, _ = trainer.optimizer.export_state()
        state = {name: _read(held) for name, held in exported.items()}
        digest = hashlib.sha256(b"".join(weight.view(torch.uint8).numpy().tobytes() for weight in weights.values()))
        save_file(weights, folder / f"weights-{rank}.safetensors")
        save_file(state, folder / f"state-{rank}.safetensors")
        return {
            "losses": losses,
            "norms": norms,
            "rewards": rewards,
            "left_out": left_out,
            "validation_loss": validation_loss,
            "weights_sha256": digest.hexdigest(),
            "state_names": sorted(state),
            "state_bytes": meter.bytes_by_category()["optimizer_state"],
            "host_state_bytes": meter.bytes_by_category(tier="host")["optimizer_state"],
            "gradient_bytes": meter.bytes_by_category()["gradients"],
            "peaks": peaks,
            "host_peaks": host_peaks,
            "evaluation_peak": evaluation_peak,
            "shared_part_bytes": sum(part.nbytes for part in trainer.tiers._adopted),
            "home_bytes": sum(streamed.home.num_bytes for streamed in trainer.weights._by_name.values()),
            "shared_memory": list_shared_memory(),
            "peak_by_category": peak.device_bytes_by_category,
            "sent_bytes": [later - earlier for earlier, later in pairwise(sent)],
            "collective_bytes": 0 if ranks is None else ranks.num_bytes,
        }
    finally:
        trainer.close(keep_weights=False)


def generate_requests(command: dict[str, Any], *, ranks: Ranks | None) -> dict[str, Any]:
    """The tokens of ``requests``, triples of prompt, number of new tokens and temperature, under ``plan``, and what it took.

    Copies of the model take their share of the requests. ``stops_after``: steps after which the first rank is asked to stop.
    """
    plan, rank = GenerationPlan.from_json(command["plan"]), 0 if ranks is None else ranks.rank
    requests = [
        Request(
            id=str(index),
            token_ids=tuple(prompt),
            sampling=Sampling(
                max_new_tokens=num_new, temperature=temperature, seed=index, stop_token_ids=tuple(command.get("stops", ()))
            ),
        )
        for index, (prompt, num_new, temperature) in enumerate(command["requests"])
    ]
    lengths = [(len(request.token_ids), request.sampling.max_new_tokens) for request in requests]
    shares = deal_sequences(lengths, num_replicas=plan.layout.num_replicas)
    mine = [requests[index] for index in sorted(shares[rank if plan.layout.num_replicas > 1 else 0])]
    tokens: dict[str, list[int]] = {}
    num_asked = 0

    def should_stop() -> bool:
        nonlocal num_asked
        num_asked += 1
        return rank == 0 and num_asked > command.get("stops_after", float("inf"))

    gc.collect()
    with open_generator(
        read_model_spec(command["config"]),
        plan=plan,
        ranks=ranks,
        cap_bytes=command.get("caps", {}).get(str(rank)),
        weights_folder=Path(command["weights"]) if "weights" in command else None,
        seed=3,
    ) as generator:
        result = run_requests(
            generator,
            mine,
            on_finished=lambda finished: tokens.update({finished.id: list(finished.token_ids)}),
            should_stop=should_stop,
        )
    return {
        "tokens": tokens,
        "was_stopped": result.was_stopped,
        "num_steps": result.num_steps,
        "device_peak_bytes": result.device_peak_bytes,
        "by_category": result.device_bytes_by_category,
        "peak_moment": result.peak_moment,
        "host_peak_bytes": result.host_peak_bytes,
        "passes": [to_json(each) for each in result.timed_passes],
    }


def list_shared_memory(process: str = "self") -> list[list[int]]:
    """The memory without a name that a process has in common with others: inode, bytes mapped."""
    found = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if "headroom-weights" in line:
            span, _, _, _, inode, *_ = line.split()
            start, _, end = span.partition("-")
            found.append([int(inode), int(end, 16) - int(start, 16)])
    return found


def list_dev_shm() -> list[str]:
    """Files in /dev/shm, but for those of database servers that other tests start and end meanwhile."""
    return sorted(file.name for file in Path("/dev/shm").iterdir() if not file.name.startswith("PostgreSQL."))


def _lag(trainer: Trainer, what: str) -> None:
    """Make each block's weights, or each update on the host, come late."""
    if what == "update":
        on_host = trainer.optimizer.on_host
        assert on_host is not None
        update = on_host.run

        def update_late(*args: Any) -> None:
            time.sleep(LAG_S)
            update(*args)

        vars(on_host)["run"] = update_late
        return
    fetch = trainer.weights._fetch

    def fetch_late(block: int) -> None:
        time.sleep(LAG_S)
        fetch(block)

    vars(trainer.weights)["_fetch"] = fetch_late


class _Faults:
    """Spoils the gradient of the last norm's weight, or leaves it without one."""

    def __init__(self, model: nn.Module) -> None:
        self.are_infinite = self.are_detached = False
        norms: Any = (module for name, module in reversed(list(model.named_modules())) if name.endswith("norm"))
        norm: Any = next(norms, None)
        if norm is None:
            return
        if norm.weight.requires_grad:
            norm.weight.register_hook(lambda gradient: gradient * float("inf") if self.are_infinite else gradient)
        forward = norm.forward
        norm.forward = lambda hidden: hidden * norm.weight.detach() if self.are_detached else forward(hidden)


def _read(held: Any) -> torch.Tensor:
    tensor: torch.Tensor = held if isinstance(held, torch.Tensor) else held.load()
    return tensor.detach().contiguous().clone()


def _carry_out(command: dict[str, Any], place: RankPlace) -> Any:
    if command["kind"] == "group":
        with Ranks(place, device=CPU) as ranks:
            return _use_group(ranks)
    if command["kind"] == "steps":
        with Ranks(place, device=CPU) as ranks:
            case = RankCase.from_json(command["case"])
            faults = {name: command.get(name, ()) for name in ("spoils", "detaches", "lags")}
            more = {name: command[name] for name in ("counts", "num_steps") if name in command}
            return carry_out_steps(case, ranks=ranks, folder=Path(command["folder"]), **more, **faults)
    if command["kind"] == "generate":
        with Ranks(place, device=CPU) as ranks:
            return generate_requests(command, ranks=ranks)
    if command["kind"] == "homes":
        with Ranks(place, device=CPU) as ranks:
            return _hold_homes(ranks, command["sizes"][place.rank], holds_s=command.get("holds_s", 0.0))
    messages: list[Any] = []
    num_asked = 0
    has_fault = place.rank in command.get("ranks_only", [place.rank])

    def should_stop() -> bool:
        nonlocal num_asked
        num_asked += 1
        if has_fault and num_asked == command.get("dies_before_step"):
            os.kill(os.getpid(), signal.SIGKILL)
        if has_fault and num_asked == command.get("hangs_before_step"):
            time.sleep(command["hangs_s"])
        return num_asked == command.get("stops_before_step")

    document = {**command["run"], "plan": command.get("as_plan", command["run"]["plan"])}
    probe = None
    if place.rank == 0 and "probes" in command:
        probe = lambda measured, num_steps_left: str(command["probes"])  # noqa: E731
    result = train(_read_run(document, place), report=messages.append, should_stop=should_stop, probe=probe)
    return {"result": result.to_json(), "messages": messages}


def _hold_homes(ranks: Ranks, sizes: list[int], *, holds_s: float) -> int:
    homes = SharedHomes(ranks, Tiers(device=CPU))
    homes.make(sizes)
    held = [homes.take().fill_(1) for _ in sizes]
    homes.wait_until_filled()
    time.sleep(holds_s)
    return sum(int(home.sum()) for home in held)


def _use_group(ranks: Ranks) -> dict[str, Any]:
    rank, last = ranks.rank, ranks.num_ranks - 1
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    everywhere = {name: torch.full((2, 3), rank + 1.0, dtype=dtype) for name, dtype in dtypes.items()}
    for tensor in everywhere.values():
        ranks.all_reduce_(tensor)
    turned = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    ranks.all_reduce_(turned, waits=False)
    ranks.settle()
    on_last = torch.full((5,), rank + 1.0)
    ranks.reduce_(on_last, owner=last)
    from_last = torch.full((5,), float(rank))
    ranks.broadcast_(from_last, owner=last)
    sent = torch.arange(7, dtype=torch.int64) * last
    received = torch.zeros_like(sent)
    if rank == last:
        ranks.send(sent, to=0)
    elif rank == 0:
        ranks.receive(received, source=last)
    with Meter(device=CPU) as meter:
        exchanged = ranks.exchange([rank, 2.0**53, float("inf") if rank == last else 0.5])
        facts = ranks.exchange_json({"rank": rank, "word": "a" * rank})
        first = ranks.from_first([rank + 7.0])
        ranks.barrier()
        metered_bytes = meter.peak().device_bytes
    return {
        "everywhere": {dtype: tensor.tolist() for dtype, tensor in everywhere.items()},
        "turned": turned.tolist(),
        "on_last": on_last.tolist(),
        "from_last": from_last.tolist(),
        "received": received.tolist(),
        "exchanged": [[str(number) for number in row] for row in exchanged],
        "facts": facts,
        "first": first,
        "metered_bytes": metered_bytes,
        "num_bytes": ranks.num_bytes,
        "network_ms": ranks.lanes.take().busy_ms["network"],
    }


def _read_run(document: dict[str, Any], place: RankPlace) -> TrainingRun:
    folder = Path(document["folder"])
    return TrainingRun(
        spec=read_model_spec(document["config"]),
        plan=Plan.from_json(document["plan"]),
        workload=from_json(TrainingWorkload, document["workload"], path="workload"),
        goal=Goal(device_budget_bytes=document.get("budgets_bytes", [2**40] * place.num_ranks)[place.rank]),
        device="cpu",
        attempt=document.get("attempt", 1),
        fence=document.get("attempt", 1),
        job_folder=folder / document["job"],
        weights_folder=None if document.get("weights") is None else folder / document["weights"],
        token_file=folder / "tokens",
        tokenizer_file=folder / "tokenizer.json",
        resume_from=document.get("resume_from"),
        timeline_every_s=0.0,
        ranks=place if place.num_ranks > 1 else None,
    )


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        start_s = time.monotonic()
        try:
            given = command["place"]
            answer = {"answer": _carry_out(command, RankPlace(**{**given, "folder": Path(given["folder"])}))}
        except HeadroomError as error:
            answer = {"error": error.to_json()}
        except Exception:
            answer = {"fault": traceback.format_exc()}
        print(json.dumps({**answer, "took_s": time.monotonic() - start_s}), flush=True)


if __name__ == "__main__":
    main()
