"""The process of an attempt, in which the training of jobs with a quick name is ``work.train``."""

import sys
from typing import Any

from tests.chaos.quick import work
from worker.run import runner
from worker.run.reporter import Reporter


def train(attempt: dict[str, Any], *, reporter: Reporter, should_stop: runner.StopFlag) -> dict[str, Any]:
    is_quick = work.kind_of(attempt["model_name"]) in work.STEP_S
    do = work.train if is_quick else runner.train
    return do(attempt, reporter=reporter, should_stop=should_stop)


if __name__ == "__main__":
    runner._WORK["train"] = train
    sys.exit(runner.main())
