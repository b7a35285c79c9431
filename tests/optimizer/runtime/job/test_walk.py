"""A plan takes a short road from the job into the training step."""

from collections.abc import Callable
from typing import Any

from optimizer.plan.plan import Plan
from optimizer.runtime.job.train import train
from tests.optimizer.runtime.job.test_train import make_run, never
from tests.walks import follow

__all__ = ["make_run"]
MAX_FILES = 10


def test_a_plan_enters_at_most_ten_files_from_the_job_to_the_end_of_its_first_step(
    make_run: Callable[..., Any]
) -> None:
    run = make_run(num_steps=1, eval_every_steps=0)
    with follow(lambda value: isinstance(value, Plan)) as walk:
        train(run, report=lambda _: None, should_stop=never)

    files = [file for file in walk.files if not file.startswith("optimizer/plan/")]
    assert len(files) <= MAX_FILES, "\n".join(files)
