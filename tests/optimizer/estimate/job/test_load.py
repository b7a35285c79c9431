"""Reading a model to be trained takes what is predicted, packed or not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.categories import CATEGORIES
from optimizer.estimate.job.load import estimate_load
from optimizer.estimate.step.simulate import Resident
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.meter import Meter
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.tiny import CONFIGS, make_plan


@pytest.mark.parametrize(("frozen", "dtype"), [("same", "fp32"), ("int8", "bf16"), ("int4", "fp32")])
def test_matrices_packed_under_adapters_take_what_is_predicted(frozen: FrozenFormat, dtype: str, tmp_path: Path) -> None:
    spec = read_model_spec({**CONFIGS["llama"], "dtype": "bfloat16", "intermediate_size": 512, "tie_word_embeddings": True})
    model: Any = build_model(spec, seed=1, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    weights = WeightsPlan(dtype=dtype, frozen=frozen)
    plan = replace(make_plan(), weights=weights)
    workload = TrainingWorkload(adapter=Adapter(rank=4), sequence_length=16, global_batch_size=2)
    profile = trace(spec, adapter=workload.adapter, extent=extent_of([(plan, workload)]))
    meter = Meter(device=torch.device("cpu"))
    model = build_prepared(
        spec, weights=weights, workload=workload, device=torch.device("cpu"), weights_folder=tmp_path, meter=meter
    )
    nothing = Resident(device=np.zeros(len(CATEGORIES), dtype=np.int64))
    load = estimate_load(profile, plan=plan, workload=workload, machine=make_cpu_machine(), loaded=nothing)
    assert load is not None
    assert (load.device_bytes, load.host_bytes) == (meter.peak().device_bytes, meter.peak().host_bytes)
    assert (load.device_bytes > meter.device_bytes) == (frozen != "same")
