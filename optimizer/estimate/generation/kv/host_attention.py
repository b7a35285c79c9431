"""Costs of attention on the host, where keys and values lie: time on the host, and bytes that cross the link. Torch-free.

The host reads a block's records once for a token; how fast depends on how many queries share each, and on the dtype
(``Rates.host_attention_curves``). Compute stands still meanwhile, on the CPU device and on CUDA. *Not modelled*: on CUDA, copies
of weights that share the link with a token's own few bytes.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from optimizer.base.categories import Link
from optimizer.estimate.categories.optimizer_state import host_bytes_per_s
from optimizer.estimate.ops.op_times import OpTimes, seconds_by_flops
from optimizer.estimate.tasks.tasks import NO_TIME, Task, add_legs, moved_bytes, single
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.formats.host_attention import HostAttention
from optimizer.formats.kv_packing import KvLayout
from optimizer.hardware.machine import Machine
from optimizer.profile.generation import HostAttended

ASSUMED_SHARES: Final = {"fp32": 0.4, "bf16": 0.15, "fp16": 0.15}
"""Shares of what the host's memory gives simple loops that attention reads where its own rate is not known: of records
in 16 bits less, as widening them takes longer than reading. Rough, after a core of an EPYC without AVX-512
(docs/experiments.md)."""


class HostAttentionCosts:
    """Costs of one micro-batch, by distinct block."""

    def __init__(self, traced: HostAttended, layouts: Sequence[KvLayout], machine: Machine, *, dtype: str) -> None:
        self._blocks = tuple(
            HostAttention(kept=layout, num_query_heads=num_heads)
            for layout, num_heads in zip(layouts, traced.num_query_heads, strict=True)
        )
        self._caps = traced.caps_scores
        self._rates, self._is_card = machine.rates, machine.device.kind != "cpu"
        self._dtype = dtype
        self._dispatch_s = OpTimes(machine.rates, dtype, generates=True).dispatch_s[0]
        self._known: dict[tuple[int, int], Task] = {}

    @property
    def room_bytes(self) -> int:
        """Bytes on the host of what all blocks use one after the other."""
        return max(block.num_bytes for block in self._blocks)

    def copied(self, kind: int) -> dict[Link, int]:
        """Bytes copied for one token, by link."""
        block = self._blocks[kind]
        return {"device_to_host": block.arriving_bytes, "host_to_device": block.leaving_bytes}

    def list_legs(self, kind: int, num_tokens: int) -> Legs:
        """Legs of one token that sees so many, one after the other."""
        rates, copied = self._rates, self.copied(kind)
        out_ms = copied["device_to_host"] / rates.device_to_host_bytes_per_s * 1000
        in_ms = copied["host_to_device"] / rates.host_to_device_bytes_per_s * 1000
        return ("copy_out", out_ms), ("host", self._host_ms(kind, num_tokens)), ("copy_in", in_ms)

    def task(self, kind: int, num_tokens: int) -> Task:
        """The task of attention on the host, before the block's own, of which it is the middle."""
        key = kind, num_tokens
        if key not in self._known:
            legs = self.list_legs(kind, num_tokens)
            time = add_legs(NO_TIME, legs)
            if self._is_card:
                # In order with compute, whatever else is on its way.
                legs = (("host", sum(lane_ms for _, lane_ms in legs)),)
            self._known[key] = Task(
                phase="",
                block=-1,
                name="",
                bytes=moved_bytes(single("kv_cache", 0)),
                time=time,
                copied=self.copied(kind),
                arrives=(Transfer(key="attention on the host", legs=legs, holds_up_cpu=True),),
            )
        return self._known[key]

    def _host_ms(self, kind: int, num_tokens: int) -> float:
        block = self._blocks[kind]
        read_bytes = num_tokens * block.kept.record_bytes
        curve = self._rates.host_attention_curves.get(self._dtype)
        if curve is None:
            seconds = read_bytes / (ASSUMED_SHARES[self._dtype] * host_bytes_per_s(self._rates))
        else:
            flops = np.array([block.num_flops(num_tokens)], dtype=np.float64)
            seconds = float(seconds_by_flops(flops, np.array([read_bytes], dtype=np.float64), curve)[0])
        num_ops = block.num_ops(num_tokens, caps_scores=self._caps[kind])
        return (seconds + num_ops * self._dispatch_s) * 1000
