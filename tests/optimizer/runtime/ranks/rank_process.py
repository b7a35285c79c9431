"""One rank as a process: reads commands as JSON lines, answers each with one; ``python -m tests.optimizer.runtime.ranks.rank_process``.

``steps``  carries out a ``RankCase`` and answers with what it measured; weights and state go to files in the command's folder.
``train``  carries out a job (``optimizer/runtime/job/train.py``).
"""

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from optimizer.base.errors import HeadroomError
from optimizer.base.serialize import from_json, to_json
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.train import TrainingRun, train
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.ranks.group import RankPlace, Ranks
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload
from tests.optimizer.runtime.ranks.cases import NUM_STEPS, RankCase

CPU = torch.device("cpu")


def carry_out_steps(case: RankCase, *, ranks: Ranks | None, folder: Path, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Steps, an evaluation, and what they left; without ``ranks`` the case of one device."""
    rank = 0 if ranks is None else ranks.rank
    torch.manual_seed(5)
    meter = Meter(device=CPU)
    model = case.make_model()
    trainer = Trainer(
        model, plan=case.plan, workload=case.workload, device=CPU, meter=meter, scratch=folder, ranks=ranks
    )
    losses, norms, rewards, peaks = [], [], [], []
    try:
        for step in range(num_steps):
            batches = case.make_batches(model, step=step, rank=rank)
            result = trainer.step(batches, learning_rate=1e-3 * (step + 1))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            rewards.append(to_json(result.rewards))
            peaks.append(meter.peak().device_bytes)
        peak = meter.peak()
        validation_loss = trainer.evaluate(case.make_batches(model, step=99, rank=rank))
        trainer.join()
        weights = {name: _read(held) for name, held in trainer.named_weights().items()}
        exported, scalars = trainer.optimizer.export_state()
        state = {name: _read(held) for name, held in exported.items()}
        digest = hashlib.sha256(b"".join(weight.view(torch.uint8).numpy().tobytes() for weight in weights.values()))
        save_file(weights, folder / f"weights-{rank}.safetensors")
        save_file(state, folder / f"state-{rank}.safetensors")
        return {
            "losses": losses,
            "norms": norms,
            "rewards": rewards,
            "validation_loss": validation_loss,
            "weights_sha256": digest.hexdigest(),
            "state_names": sorted(state),
            "state_bytes": meter.bytes_by_category()["optimizer_state"],
            "host_state_bytes": meter.bytes_by_category(tier="host")["optimizer_state"],
            "gradient_bytes": meter.bytes_by_category()["gradients"],
            "peaks": peaks,
            "peak_by_category": peak.device_bytes_by_category,
            "collective_bytes": 0 if ranks is None else ranks.num_bytes,
        }
    finally:
        trainer.close(keep_weights=False)


def _read(held: Any) -> torch.Tensor:
    tensor: torch.Tensor = held if isinstance(held, torch.Tensor) else held.load()
    return tensor.detach().contiguous().clone()


def _carry_out(command: dict[str, Any], place: RankPlace) -> Any:
    if command["kind"] == "steps":
        with Ranks(place, device=CPU) as ranks:
            case = RankCase.from_json(command["case"])
            return carry_out_steps(case, ranks=ranks, folder=Path(command["folder"]))
    messages: list[Any] = []
    num_asked = 0

    def should_stop() -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == command.get("dies_before_step"):
            os.kill(os.getpid(), signal.SIGKILL)
        if num_asked == command.get("hangs_before_step"):
            time.sleep(command["hangs_s"])
        return num_asked == command.get("stops_before_step")

    result = train(_read_run(command["run"], place), report=messages.append, should_stop=should_stop)
    return {"result": result.to_json(), "messages": messages}


def _read_run(document: dict[str, Any], place: RankPlace) -> TrainingRun:
    folder = Path(document["folder"])
    return TrainingRun(
        spec=read_model_spec(document["config"]),
        plan=Plan.from_json(document["plan"]),
        workload=from_json(TrainingWorkload, document["workload"], path="workload"),
        goal=Goal(device_budget_bytes=document.get("budget_bytes", 2**40)),
        device="cpu",
        attempt=document.get("attempt", 1),
        fence=document.get("attempt", 1),
        job_folder=folder / document["job"],
        weights_folder=None,
        token_file=folder / "tokens",
        tokenizer_file=folder / "tokenizer.json",
        resume_from=document.get("resume_from"),
        timeline_every_s=0.0,
        ranks=place if place.num_ranks > 1 else None,
    )


def main() -> None:
    torch.set_num_threads(1)
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
        sys.stdout.write(json.dumps({**answer, "took_s": time.monotonic() - start_s}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
