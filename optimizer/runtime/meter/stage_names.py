"""Names the stage of a job on an out-of-memory that comes in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from optimizer.base.errors import OutOfMemory
from optimizer.runtime.meter.meter import Meter

JobStage = Literal["load", "resume", "first_step", "steady_step", "evaluation", "save", "merge", "export"]


@contextmanager
def name_stage(stage: JobStage, **facts: int) -> Iterator[None]:
    """Note on an out-of-memory in which stage it came, with further facts of that moment."""
    try:
        yield
    except OutOfMemory as error:
        error.fields = {"stage": stage, **facts, **error.fields}
        raise


@contextmanager
def loading(meter: Meter) -> Iterator[None]:
    """Inside, a model that is to generate is loaded; what the device had at the most is held against the cap at the end."""
    with name_stage("load"), meter.translating():
        yield
        meter.check_peak()
