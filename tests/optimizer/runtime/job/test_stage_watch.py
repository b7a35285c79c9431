"""Stages of a job are held to the device's budget by a card's own counters."""

from pathlib import Path

import pytest
import torch

from optimizer.base.errors import OutOfDeviceMemory
from optimizer.runtime.job.stage_watch import StageWatch
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.meter.stage_names import JobStage
from tests.optimizer.runtime.counted_card import counted_card


@pytest.mark.parametrize(
    ("stage", "on_host"), [("load", False), ("resume", False), ("save", True), ("merge", True), ("export", True)]
)
def test_a_stage_that_only_a_cards_counters_saw_go_over_the_budget_is_named(
    stage: JobStage, *, on_host: bool, tmp_path: Path
) -> None:
    with counted_card() as memory:
        watch = StageWatch(Meter(device=torch.device("cpu"), cap_bytes=4096), job_folder=tmp_path)
        with watch.during(stage, on_host=on_host):
            memory.spike(4096)
        assert watch.found[stage].device_peak_bytes == 4096
        with pytest.raises(OutOfDeviceMemory, match="inside an op") as caught, watch.during(stage, on_host=on_host):
            memory.spike(4608)
        assert caught.value.fields["stage"] == stage
