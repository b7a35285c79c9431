"""The least time that a generation's copies take, in closed form: a bound for a search, which prices nothing for it. Torch-free.

Copies between host and device alone, as if the links were never idle; what the disk takes comes on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimizer.categories import Link
from optimizer.estimate.inference_pass import GenerationPass
from optimizer.hardware.machine import Machine
from optimizer.plan.inference import InferencePlan
from optimizer.plan.passes import MicroBatchShape
from optimizer.profile.inference import InferenceProfile
from optimizer.workload import InferenceWorkload


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """Of a plan at any batch."""

    pass_s: float
    """What every pass takes, whatever it holds: weights."""
    sequence_s: float
    """What every sequence adds, wherever it runs: keys and values."""


def estimate_copies(
    profile: InferenceProfile, *, plan: InferencePlan, workload: InferenceWorkload, machine: Machine
) -> CopyTimes:
    """plan: its batch is not looked at. Of prompts that differ the shortest counts for all, and the fewest new tokens. Of packed
    keys and values, which move in whole blocks and are priced on average, nothing counts.
    """
    length = min(workload.prompt_lengths or (workload.prompt_length,))
    prefill = min(length, plan.prefill_tokens or length)
    num_new = min(workload.new_token_counts or (workload.num_new_tokens,))
    shape = MicroBatchShape(batch_size=1, prompt_length=prefill, num_steps=length - prefill + num_new)
    one = GenerationPass(
        profile, replace(plan, batch_size=1, num_micro_batches=1), workload, machine, micro_batches=(shape,)
    )
    pass_s = _seconds(one.weights_copied_bytes, machine)
    all_s = _seconds(one.copied_bytes, machine) if plan.kv_cache.dtype == "same" else pass_s
    return CopyTimes(pass_s=pass_s, sequence_s=all_s - pass_s)


def _seconds(copied_bytes: Mapping[Link, int], machine: Machine) -> float:
    rates = machine.rates
    in_s = copied_bytes.get("host_to_device", 0) / rates.host_to_device_bytes_per_s
    return in_s + copied_bytes.get("device_to_host", 0) / rates.device_to_host_bytes_per_s
