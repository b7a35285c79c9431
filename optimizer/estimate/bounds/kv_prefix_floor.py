"""Costs and savings of making keys and values of a prompt's first tokens again, for many batches, by how many tokens these
are, and how many are best. Bounds for a search, as ``generation_floor.py`` has them of the rest. Torch-free.

The link's time falls and compute's rises with every token. Where both work beside each other the best number is where they
balance; where they do not, it is all or none. *Not modelled*: device bytes while keys and values are made.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from optimizer.estimate.bounds.phase_grid import ManyShapes
from optimizer.estimate.categories.stores import STORE_LANES, read_ms
from optimizer.estimate.generation.splits import Floats, Splits
from optimizer.formats.kv_prefix import SHORTEST_PREFIX, count_rebuilt
from optimizer.hardware.machine import Machine
from optimizer.plan.kv_cache import KvPlace
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile

NUM_LENGTHS: Final = 16
"""Lengths that are looked at, evenly up to the longest. The best of them is within a thirty-second of the best of all,
and, as a hidden state weighs half of keys and values, within a sixty-fourth of the moves' time."""
Lanes = tuple[Floats, Floats, Floats, Floats]
"""Milliseconds of compute, of copies, of the disk and of the network, each by number of micro-batches and by batch size."""


class BestPrefix(NamedTuple):
    """The best prefix by number of micro-batches and by batch size."""

    total_s: Floats
    num_tokens: Floats
    """Length of the best prefix; 0 where making none again takes the least time."""
    home_less_bytes: Floats
    sent_less_ms: Floats
    """Most time, of all lengths, that is saved of a prompt's copies to the home."""
    saved_between_s: Floats
    """Most time that batches between this one and the next could save of what is added."""


def list_prefix_lengths(longest: int) -> tuple[int, ...]:
    """Ascending, without none at all."""
    found = {-(-longest * place // NUM_LENGTHS) for place in range(1, NUM_LENGTHS + 1)}
    return tuple(sorted(length for length in found if length >= SHORTEST_PREFIX))


class PrefixFloors:
    """Prefixes under one representation of the weights; unless said otherwise arrays are [length, shape of a micro-batch].
    Lengths: 0 for none.
    """

    def __init__(
        self, profile: GenerationProfile, weights: WeightsPlan, machine: Machine, split: Splits, *, lengths: Sequence[int]
    ) -> None:
        self._profile, self._weights, self._machine, self._split = profile, weights, machine, split
        self._lengths = np.array(lengths)
        self._num_rebuilt = np.array(
            [[count_rebuilt(each, prompt_length=shape.prompt_length) for shape in split.shapes] for each in self._lengths]
        )
        self._num_later = np.array([shape.num_steps - 1 for shape in split.shapes])

    def best(
        self,
        prefill: Lanes,
        decode: Lanes,
        *,
        without_s: Floats,
        place: KvPlace,
        together: Callable[[Floats, Floats, Floats, Floats], Floats],
    ) -> BestPrefix:
        """prefill, decode: of all passes, with all keys and values kept; without_s: what both take then. together: of lanes."""
        rates, split = self._machine.rates, self._split
        made_ms, come_less_bytes, sent_less_bytes = (
            np.einsum("ks,nbs->knb", each, split.counts)
            for each in (self._compute_ms, self._saved_bytes * self._num_later, self._saved_bytes)
        )
        sent_less_ms = sent_less_bytes / rates.device_to_host_bytes_per_s * 1000
        come_less_ms = come_less_bytes / rates.host_to_device_bytes_per_s * 1000
        read_less_ms = read_ms(1, rates, place=place) * come_less_bytes
        disk_less_ms, network_less_ms = (
            read_less_ms if STORE_LANES.get(place) == lane else 0.0 for lane in ("disk", "network")
        )
        prefill_ms = together(prefill[0], prefill[1] - sent_less_ms, prefill[2], prefill[3])
        decode_ms = together(
            decode[0] + made_ms, decode[1] - come_less_ms, decode[2] - disk_less_ms, decode[3] - network_less_ms
        )
        total_s = (prefill_ms + decode_ms) / 1000
        total_s[self._lengths == 0] = without_s
        best = total_s.argmin(axis=0)
        home_less_bytes = np.einsum("ks,nbs->knb", self._saved_bytes, split.first)
        return BestPrefix(
            total_s=total_s.min(axis=0),
            num_tokens=self._lengths[best].astype(np.float64),
            home_less_bytes=np.take_along_axis(home_less_bytes, best[None], axis=0)[0],
            sent_less_ms=sent_less_ms.max(axis=0),
            saved_between_s=split.saved_between(self._compute_ms.max(axis=0)) / 1000,
        )

    @cached_property
    def _saved_bytes(self) -> Floats:
        """Bytes saved of a prompt's copies to the home, of each later token's from there, and of the home itself: the same
        for all three.
        """
        profile, kinds = self._profile, self._profile.block_kinds
        by_token = sum(
            profile.kv[kind].elements_per_token - profile.hidden_size for kind in kinds if profile.can_rebuild(kind)
        )
        batches = np.array([shape.batch_size for shape in self._split.shapes], dtype=np.float64)
        found: Floats = self._num_rebuilt * batches * by_token * self._weights.bytes_per_element
        return found

    @cached_property
    def _compute_ms(self) -> Floats:
        """Compute time of all decodes."""
        phase, counts = self._profile.rebuild, self._num_rebuilt
        times = np.zeros(counts.shape)
        at = np.argwhere(counts > 0)
        if phase is not None and len(at):
            shapes = [(self._split.shapes[column].batch_size, int(counts[row, column])) for row, column in at]
            times[tuple(at.T)] = ManyShapes(phase, self._weights, shapes, self._machine).blocks_ms
        found: Floats = times * self._num_later
        return found
