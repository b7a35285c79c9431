"""The run that ``large`` measures, in a process of its own: reads a JSON file, prints a JSON line for each stage and a result.

Everything is imported first, so that what the process takes before the model is known.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401 (imported by the plan otherwise, in the midst of what is measured)
import peft  # noqa: F401
import torch

from optimizer.base.serialize import from_json, to_json
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.stage_watch import StageWatch
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.workload import TrainingWorkload


def say(**fields: Any) -> None:
    print(json.dumps({"time_s": time.time(), **fields}), flush=True)


class _SaysStages(StageWatch):
    @contextmanager
    def during(self, stage: Any, *, on_host: bool = False) -> Iterator[None]:
        say(stage=stage, begins=True)
        with super().during(stage, on_host=on_host):
            yield
        say(stage=stage, begins=False)


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    from optimizer.models.build import build_model
    from optimizer.runtime.job import train as module

    vars(module)["StageWatch"] = _SaysStages
    spec = read_model_spec(given["config"])
    build_model(spec, device="meta", dtype=torch.bfloat16)  # imports the model's own definition
    torch.zeros(64, 64).matmul(torch.zeros(64, 64))
    say(stage="imported", begins=True)
    time.sleep(1.0)
    run = TrainingRun(
        spec=spec,
        plan=Plan.from_json(given["plan"]),
        workload=from_json(TrainingWorkload, given["workload"], path="workload"),
        goal=Goal(device_budget_bytes=given["device_budget_bytes"]),
        device="cpu",
        attempt=1,
        fence=1,
        job_folder=Path(given["job_folder"]),
        weights_folder=Path(given["weights_folder"]),
        token_file=Path(given["token_file"]),
        tokenizer_file=Path(given["weights_folder"]) / "tokenizer.json",
    )

    def report(message: dict[str, Any]) -> None:
        if message["type"] in ("phase", "checkpoint") or message.get("kind") == "step":
            say(message=message)

    result = train(run, report=report, should_stop=lambda: False)
    say(result=to_json(result))


if __name__ == "__main__":
    main()
