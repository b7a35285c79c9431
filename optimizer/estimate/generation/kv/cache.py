"""Costs of the cache of keys and values: exact by the model's heads and windows, the batch, and the tokens it has room for.

Bytes are those of ``runtime/generation/kv_layer.py``, ``kv_placed.py`` and ``kv_workspace.py``, tensor for tensor. Of a
plain cache nothing takes time beside what is traced: writing a token is one of a block's ops. Of others there is a task
before each block's own.

Time in between the packing of blocks is that of the average: packing a 64th of a block, half a block waiting. Bytes moved are
counted exactly.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from optimizer.base.categories import Link
from optimizer.estimate.categories.stores import STORE_LANES, STORE_LINKS, reach_ms, read_ms, write_ms
from optimizer.estimate.generation.kv.host_attention import HostAttentionCosts
from optimizer.estimate.generation.kv.packing import KvOp, estimate_ops_s, list_copy_ops, list_pack_ops, list_unpack_ops
from optimizer.estimate.generation.kv.prefix import PrefixCosts
from optimizer.estimate.ops.op_times import OpTimes, keys_and_values_python_s
from optimizer.estimate.tasks.parts import PartTime
from optimizer.estimate.tasks.tasks import Task, add_legs, moved_bytes, single
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.formats.kv_packing import KV_BLOCK_TOKENS, KvLayout, KvShape
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import MicroBatchShape
from optimizer.profile.generation import GenerationProfile

_MEAN_WAITING = (KV_BLOCK_TOKENS + 1) / 2
"""Mean number of the newest tokens that are not packed, between 1 and a block of them."""


def list_kv_bytes(
    profile: GenerationProfile, plan: GenerationPlan, *, batch_size: int, num_tokens: int
) -> tuple[int, ...]:
    """Bytes by block, of a pass of so many sequences with room for so many tokens each, wherever they are."""
    layouts = list_layouts(profile, plan, batch_size=batch_size, num_tokens=num_tokens)
    by_kind = [layout.store_bytes + layout.residual_bytes for layout in layouts]
    return tuple(by_kind[kind] for kind in profile.block_kinds)


def list_layouts(
    profile: GenerationProfile,
    plan: GenerationPlan,
    *,
    batch_size: int,
    num_tokens: int,
    prefix: PrefixCosts | None = None,
) -> tuple[KvLayout, ...]:
    """Layouts by distinct block. prefix: of what is made again; nothing unless given."""
    return tuple(
        KvLayout(
            shape=KvShape(
                batch_size=batch_size,
                num_heads=tensors.num_heads,
                key_dim=tensors.key_dim,
                value_dim=tensors.value_dim,
                element_bytes=plan.weights.bytes_per_element,
            ),
            dtype=plan.kv_cache.dtype,
            capacity=num_tokens,
            window=tensors.window,
            prefix_tokens=0 if prefix is None else prefix.num_tokens(kind),
            state_bytes=batch_size * profile.hidden_size * plan.weights.bytes_per_element,
        )
        for kind, tensors in enumerate(profile.kv)
    )


class Workspace(NamedTuple):
    """Device memory that caches share, as far as it was needed."""

    front_bytes: int
    slot_bytes: int
    """Bytes of the first slot; the others are made with the first token after the prompt."""


NO_WORKSPACE: Final = Workspace(0, 0)


class KvCosts:
    """Costs of the cache of one micro-batch."""

    def __init__(self, profile: GenerationProfile, plan: GenerationPlan, machine: Machine, *, shape: MicroBatchShape) -> None:
        self._plan, self._rates = plan.kv_cache, machine.rates
        self._shape = shape
        self._prefix = PrefixCosts(profile, plan, machine, shape=shape)
        self._by_kind = list_layouts(
            profile, plan, batch_size=shape.batch_size, num_tokens=shape.cache_length, prefix=self._prefix
        )
        self._kinds = profile.block_kinds
        self._counts = tuple(Counter(profile.block_kinds).items())
        self._is_away = self._plan.place != "device"
        self._on_host: HostAttentionCosts | None = None
        if self._plan.attention == "host":
            profile.decode_with("host")
            assert profile.on_host is not None
            self._on_host = HostAttentionCosts(profile.on_host, self._by_kind, machine, dtype=plan.weights.dtype)
        self._dtype = plan.weights.dtype
        self._known: dict[Hashable, PartTime] = {}

    # Bytes.

    @property
    def total_bytes(self) -> int:
        """Bytes of keys and values, wherever they are."""
        return self._sum(lambda layout: layout.home_bytes + layout.residual_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of its own on the device, as long as it lives."""
        own = self._sum(lambda layout: (0 if self._is_away else layout.store_bytes) + layout.residual_bytes)
        return own + sum(self._prefix.positions)

    def block_bytes(self, kind: int) -> tuple[int, int]:
        """Bytes on the device of a block's own as long as it lives: what is packed or plain, and the newest tokens."""
        layout = self._by_kind[kind]
        return 0 if self._is_away else layout.store_bytes, layout.residual_bytes

    @property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a distinct block's home off the device, and how many blocks there are of it."""
        return tuple((self._home_of(self._by_kind[kind]), count) for kind, count in self._counts)

    @property
    def room_bytes(self) -> int:
        """Bytes on the host that attention there works in."""
        return self._on_host.room_bytes if self._on_host is not None and self._shape.num_steps > 1 else 0

    @cached_property
    def front_bytes(self) -> int:
        """Bytes that it needs of the workspace."""
        return max(layout.front_bytes for layout in self._by_kind)

    @cached_property
    def slot_bytes(self) -> int:
        return max(map(self._slot_of, self._by_kind))

    def list_arrivals(self, block: int, workspace: Workspace) -> tuple[tuple[int, ...], Workspace]:
        """Device bytes that come, and go where they are below 0, as a block first runs beside this workspace, which grows."""
        layout = self._by_kind[self._kinds[block]]
        if self._plan.is_plain:
            # Keys, then values.
            return (layout.store_bytes - layout.store_bytes // 2, layout.store_bytes // 2), workspace
        wanted = Workspace(layout.front_bytes, self._slot_of(layout))
        own = (0 if self._is_away else layout.store_bytes, layout.residual_bytes)
        come = (
            *_list_growth(workspace.slot_bytes, wanted.slot_bytes),
            *(num_bytes for num_bytes in own if num_bytes),
            *_list_growth(workspace.front_bytes, wanted.front_bytes),
            *(self._prefix.positions if block == self._prefix.first_block else ()),
        )
        return come, Workspace(*map(max, workspace, wanted))

    # Moves.

    @property
    def prefill_copied(self) -> Mapping[Link, int]:
        """Exactly, of all blocks."""
        return _by_link(self._plan.place, sent_bytes=self._sum(self._sent_with_prompt))

    @property
    def decode_copied(self) -> Mapping[Link, int]:
        """Exactly, of all blocks and all steps but the prefill."""
        low, high = self._shape.prompt_length, self._shape.cache_length - 1
        if not self._is_away or high < low:
            return {}
        if self._on_host is not None:
            by_token = add_copies(*(self._on_host.copied(kind) for kind in self._kinds))
            return {link: (high - low + 1) * num_bytes for link, num_bytes in by_token.items()}
        return _by_link(
            self._plan.place,
            brought_bytes=self._sum(
                lambda layout: layout.total_brought(low, high) * layout.record_bytes - (high - low + 1) * layout.saved_bytes
            ),
            sent_bytes=self._sum(lambda layout: layout.total_sent(low, high) * layout.record_bytes),
        )

    # Tasks.

    def prefill_task(self, kind: int) -> Task:
        """Packing a prompt's tokens and sending them away, in blocks of a kind."""
        layout = self._by_kind[kind]
        sent_bytes = self._sent_with_prompt(layout)
        time = self._time("prefill", kind, self._shape.prompt_length)
        legs = self._out_legs(sent_bytes) if sent_bytes else ()
        return Task(
            phase="",
            block=-1,
            name="",
            bytes=moved_bytes(single("kv_cache", 0)),
            time=add_legs(time, legs),
            copied=_by_link(self._plan.place, sent_bytes=sent_bytes),
            leaves=(legs,) if legs else (),
        )

    def list_coming(self, kind: int, *, step: int, key: Hashable) -> tuple[Transfer, ...]:
        """Transfers that come for a token that is decoded; the prefill is step 0. On average, as time is. Hidden states
        come apart.
        """
        layout, num_seen = self._by_kind[kind], self._shape.prompt_length + step - 1
        if not self._home_of(layout) or self._on_host is not None:
            return ()
        num_records = _mean_packed(layout, num_seen) if layout.is_packed else layout.num_brought(num_seen)
        if not layout.prefix_tokens:
            return (self._coming(num_records * layout.record_bytes, key),)
        rest_bytes = (num_records - layout.prefix_tokens) * layout.record_bytes
        return self._coming(layout.prefix_bytes, (key, "hidden states")), self._coming(rest_bytes, key)

    def _coming(self, num_bytes: float, key: Hashable) -> Transfer:
        legs: Legs = (("copy_in", num_bytes / self._rates.host_to_device_bytes_per_s * 1000),)
        place = self._plan.place
        if place in STORE_LANES:
            come_ms = read_ms(round(num_bytes), self._rates, place=place) + reach_ms(num_bytes, self._rates, place=place)
            legs = ((STORE_LANES[place], come_ms), *legs)
        return Transfer(key=key, legs=legs, holds_up_cpu=True)

    def decode_tasks(
        self, kind: int, *, step: int, arrives: Sequence[Transfer], begins: Sequence[Transfer], was_begun: bool
    ) -> tuple[Task, ...]:
        """The tasks before the block's own: as ``decode_task``, and where hidden states come, what is made of them
        first.
        """
        layout = self._by_kind[kind]
        if not layout.prefix_tokens:
            return (self.decode_task(kind, step=step, arrives=arrives, begins=begins, was_begun=was_begun),)
        states, rest = arrives
        begun = [*(() if was_begun else (rest,)), *begins]
        legs = [each.legs for each in (*(() if was_begun else (states,)), *begun)]
        again = self._prefix.task(kind, layout, states=states, begins=begun, legs=legs)
        return again, self.decode_task(kind, step=step, arrives=(rest,), begins=(), was_begun=True)

    def decode_task(
        self, kind: int, *, step: int, arrives: Sequence[Transfer], begins: Sequence[Transfer], was_begun: bool
    ) -> Task:
        """The task of one token more: what comes, is packed and unpacked, and goes. was_begun: what arrives is on its way
        already.
        """
        layout, num_seen = self._by_kind[kind], self._shape.prompt_length + step - 1
        if self._on_host is not None:
            return self._on_host.task(kind, min(num_seen + 1, layout.num_records))
        time = self._time("decode", kind, num_seen)
        leaves: tuple[Legs, ...] = ()
        copied: Mapping[Link, int] = {}
        if self._home_of(layout):
            leaves = (self._out_legs(layout.record_bytes, share=1 / KV_BLOCK_TOKENS if layout.is_packed else 1.0),)
            copied = _by_link(
                self._plan.place,
                brought_bytes=(layout.num_brought(num_seen) - layout.prefix_tokens) * layout.record_bytes,
                sent_bytes=layout.num_sent(num_seen) * layout.record_bytes,
            )
        for legs in (*leaves, *(each.legs for each in (*(() if was_begun else arrives), *begins))):
            time = add_legs(time, legs)
        return Task(
            phase="",
            block=-1,
            name="",
            bytes=moved_bytes(single("kv_cache", 0)),
            time=time,
            copied=copied,
            arrives=tuple(arrives),
            begins=tuple(begins),
            leaves=leaves,
        )

    # Helpers.

    def _sum(self, size_of: Callable[[KvLayout], int]) -> int:
        """The sum over all blocks."""
        return sum(count * size_of(self._by_kind[kind]) for kind, count in self._counts)

    def _home_of(self, layout: KvLayout) -> int:
        return layout.home_bytes if self._is_away else 0

    def _slot_of(self, layout: KvLayout) -> int:
        """Room on the device for what comes; where nothing does, for what leaves with a prompt."""
        if self._on_host is not None:
            return self._sent_with_prompt(layout)
        return layout.store_bytes if self._is_away else 0

    def _sent_with_prompt(self, layout: KvLayout) -> int:
        if not self._home_of(layout):
            return 0
        return layout.num_brought(self._shape.prompt_length) * layout.record_bytes - layout.saved_bytes

    def _out_legs(self, num_bytes: int, *, share: float = 1.0) -> Legs:
        """The way out of keys and values. share: of the tokens with which so much leaves."""
        legs: Legs = (("copy_out", share * num_bytes / self._rates.device_to_host_bytes_per_s * 1000),)
        place = self._plan.place
        if place in STORE_LANES:
            go_ms = write_ms(num_bytes, self._rates, place=place) + reach_ms(num_bytes, self._rates, place=place)
            legs = (*legs, (STORE_LANES[place], share * go_ms))
        return legs

    @cached_property
    def _times(self) -> OpTimes:
        return OpTimes(self._rates, self._dtype, element_dtype=self._dtype, generates=True)

    def _time(self, phase: str, kind: int, num_seen: int) -> PartTime:
        """Time on compute, beside what is traced."""
        key = (phase, kind, num_seen)
        if key not in self._known:
            layout = self._by_kind[kind]
            ops = _prompt_ops(layout, num_seen) if phase == "prefill" else self._token_ops(layout, num_seen)
            kernels_s, beside_s = estimate_ops_s(ops, self._times)
            if phase == "decode" and layout.is_packed and layout.num_packed(num_seen):
                pack = estimate_ops_s(list_pack_ops(layout, 1), self._times)
                kernels_s, beside_s = kernels_s + pack[0] / KV_BLOCK_TOKENS, beside_s + pack[1] / KV_BLOCK_TOKENS
            is_stored = self._plan.place in STORE_LANES
            moving_s = keys_and_values_python_s(self._rates, is_stored=is_stored) if self._home_of(layout) else 0.0
            self._known[key] = PartTime.spent(
                quantization=kernels_s * 1000, dispatch=beside_s * 1000, hooks=moving_s * 1000
            )
        return self._known[key]

    @staticmethod
    def _token_ops(layout: KvLayout, num_seen: int) -> Iterator[KvOp]:
        if layout.is_packed and layout.num_packed(num_seen + 1) > layout.first_block(num_seen):
            yield from list_unpack_ops(layout, _mean_packed(layout, num_seen + 1))
            yield from list_copy_ops(layout, _MEAN_WAITING)


def _prompt_ops(layout: KvLayout, length: int) -> Iterator[KvOp]:
    if layout.is_packed:
        yield from list_pack_ops(layout, layout.num_brought(length))
        if layout.num_front:
            yield from list_copy_ops(layout, length - layout.num_packed(length) * KV_BLOCK_TOKENS)


def _mean_packed(layout: KvLayout, num_seen: int) -> float:
    """Blocks that the next token sees packed, on average over as many tokens as a block holds."""
    dropped = 0.0 if layout.window is None else max(0.0, num_seen - layout.window + 1 - _MEAN_WAITING)
    return max(0.0, num_seen - _MEAN_WAITING - dropped) / KV_BLOCK_TOKENS


def _list_growth(before: int, wanted: int) -> tuple[int, ...]:
    """Bytes that go and come where room must be larger."""
    if wanted <= before:
        return ()
    return (-before, wanted) if before else (wanted,)


def _by_link(place: str, *, brought_bytes: int = 0, sent_bytes: int = 0) -> dict[Link, int]:
    """Links without traffic left out."""
    found: dict[Link, int] = {"host_to_device": brought_bytes, "device_to_host": sent_bytes}
    if place in STORE_LINKS:
        out, back = STORE_LINKS[place]
        found |= {back: brought_bytes, out: sent_bytes}
    return {link: num_bytes for link, num_bytes in found.items() if num_bytes}


def add_copies(*copied: Mapping[Link, int]) -> dict[Link, int]:
    """Sum bytes by link; links without traffic left out."""
    total: dict[Link, int] = {}
    for each in copied:
        for link, num_bytes in each.items():
            if num_bytes:
                total[link] = total.get(link, 0) + num_bytes
    return total


def sum_homes(passes: Iterable[Sequence[Sequence[tuple[int, int]]]]) -> int:
    """Bytes of the homes of passes one after the other, each given by micro-batch as ``KvCosts.homes``: homes stay, each as
    large as the largest that it was.
    """
    largest: dict[tuple[int, int], tuple[int, int]] = {}
    for homes in passes:
        for turn, by_kind in enumerate(homes):
            for kind, (num_bytes, count) in enumerate(by_kind):
                before, _ = largest.get((turn, kind), (0, 0))
                largest[turn, kind] = max(before, num_bytes), count
    return sum(num_bytes * count for num_bytes, count in largest.values())
