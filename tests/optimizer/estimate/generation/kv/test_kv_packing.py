"""The ops that packing is priced by are those that the runtime runs."""

import pytest
import torch

from optimizer.estimate.generation.kv.packing import list_pack_ops, list_unpack_ops
from optimizer.formats.kv_packing import KvLayout, KvShape
from optimizer.profile.events import Allocated, Ran
from optimizer.profile.meta_ops.meta_ops import Ops, pretend_cpu
from optimizer.profile.trace.recorder import Recorder
from optimizer.runtime.generation.kv_packing import KvPacker


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_packing_and_unpacking_run_the_ops_they_are_priced_by_and_allocate_nothing(
    dtype: str, weights: torch.dtype
) -> None:
    shape = KvShape(batch_size=2, num_heads=3, key_dim=40, value_dim=24, element_bytes=weights.itemsize)
    layout = KvLayout(shape=shape, dtype=dtype, capacity=1000, window=None)
    ops, num_blocks = Ops(), 11
    recorder = Recorder(ops)
    with pretend_cpu(ops), recorder:
        keys, values = (
            torch.empty(num_blocks * 64, 2, 3, dim, dtype=weights, device="meta") for dim in (40, 24)
        )
        records = torch.empty(num_blocks, layout.record_bytes, dtype=torch.uint8, device="meta")
        lent = torch.empty(layout.front_bytes, dtype=torch.uint8, device="meta")
        packer = KvPacker(layout, weights)
        recorder.start()
        packer.pack(keys, values, records=records, lent=lent)
        num_events = len(recorder.events)
        packer.unpack(records, keys=keys, values=values)
        recorder.stop()
    assert not any(isinstance(event, Allocated) for event in recorder.events)
    for events, priced in (
        (recorder.events[:num_events], list_pack_ops(layout, num_blocks)),
        (recorder.events[num_events:], list_unpack_ops(layout, num_blocks)),
    ):
        ran = [(event.name, event.read_bytes, event.written_bytes) for event in events if isinstance(event, Ran)]
        assert ran == [tuple(op) for op in priced]
