"""Puts a model on a device to answer: its weights, the room for keys and values, and the meter that caps both."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from optimizer.models.spec import ModelSpec
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import build_for_generation
from optimizer.runtime.meter.device import prepared_device, set_num_threads
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.meter.stage_names import loading
from optimizer.runtime.serving.server import Server


@contextmanager
def open_server(
    spec: ModelSpec,
    *,
    weights: WeightsPlan,
    num_rows: int,
    max_tokens: int,
    kv_limit_bytes: int,
    budget_bytes: int,
    device_name: str,
    weights_folder: Path | None,
) -> Iterator[tuple[Server, Meter]]:
    """A server that takes requests, and its meter; the device is given back at the end.

    num_rows: sequences that run at once; max_tokens: longest prompt and answer; kv_limit_bytes: for keys and values of all.
    Raises InvalidModel, OutOfDeviceMemory.
    """
    set_num_threads()
    device = torch.device(device_name)
    with prepared_device(device):
        meter = Meter(device=device, cap_bytes=budget_bytes)
        with loading(meter):
            model = build_for_generation(spec, weights=weights, device=device, weights_folder=weights_folder, meter=meter)
            meter.assign_module(model)
        meter.reset_peak()
        server = Server(
            model,
            device=device,
            num_rows=num_rows,
            kv_limit_bytes=kv_limit_bytes,
            max_tokens=max_tokens,
            meter=meter,
        )
        yield server, meter
