"""Carries out the weights row of a plan: the dtype, and where blocks keep their weights between uses.

With ``place`` host, disk or remote, each parameter that belongs to exactly one block, and to nothing else, has a home there.
On the device it is a storage of no bytes but while its block is in use; the parameter, its storage object and every view of
it stay the same, so what autograd has saved of it is whole again when its block comes back. Copies go through a view of bytes,
which autograd's version counters do not see. Parameters that blocks share, buffers, and trained adapters stay on the device.

Of several ranks that update each tensor on one of them, or none, homes on the host are there once for all
(``runtime/ranks/shared_homes.py``); else each rank has its own. Jobs with adapters on one base model have its homes on the host
once, too (``runtime/tiers/base_homes.py``).

Of ranks that share weights out (``runtime/ranks/dealt_weights.py``) the home of a tensor is the device of the rank that keeps it:
there its parameter is whole all the time, and nothing of it comes or goes; on the others it comes from there, as from any home.

Of a model that is cut each rank gives homes to its own blocks' weights and streams these alone, its blocks being all that there
are; it lets go of the last one's as it leaves the forward (``runtime/ranks/pipeline``). With ``breadth_first`` a stage does all
micro-batches before the next one begins, so all of its blocks come when the first of them does and go when the next stage's come,
or at the end of the step; ``prefetch`` blocks of the next stage, or of more, come with them.

What is allocated and freed, in order (the tensors of a block in the model's order, each whole):

construction   for each streamed tensor: its home (host: category weights; disk: its share of the scratch file; remote: its
               values in the store), then its device bytes go. Homes that ranks share come all at once, before the first. With a
               store also, from the first fetch on, the staging area of ``tiers/tiers.py`` on the host.
forward        before block i: the device bytes of block i - 1 go, then those of blocks i to i + prefetch come, as far as
               they are not there. At the end of the backbone all that are there go.
backward       as the gradient of block i's output is complete: block i + 1 goes, then blocks i to i - prefetch come. At the
               end of backward all go. The same for each micro-batch, and forward alone in evaluation.

All device bytes count as weights. Each coming is one copy of the block's bytes (from a store: to the host, then to the device);
going copies nothing: a home is newer than the device, never older, because trained weights are updated at home.
An fp32 home is the optimizer's master copy itself (``host_update.py``).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.models.anatomy import find_blocks
from optimizer.plan.devices.stages import StageOfModel, list_brought
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.layers.filling import take_read_later
from optimizer.runtime.meter.meter import count_allocations, set_region
from optimizer.runtime.ranks.dealt_weights import NOTHING, DealtHome, DealtWeights
from optimizer.runtime.ranks.group import Arriving
from optimizer.runtime.ranks.pipeline.keepers import StageWeights, leave_one_number
from optimizer.runtime.ranks.shared_homes import SharedHomes
from optimizer.runtime.tiers.base_homes import BaseHomes
from optimizer.runtime.tiers.copies import Copy, as_bytes
from optimizer.runtime.tiers.homes import HomeTensor, OffDeviceBytes, on_host
from optimizer.runtime.tiers.tiers import Tiers

_TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(plan: WeightsPlan) -> torch.dtype:
    """The dtype the model is built in."""
    return _TORCH_DTYPE[plan.dtype]


def list_streamed(model: nn.Module, blocks: Sequence[nn.Module], *, trains_all: bool) -> list[dict[str, nn.Parameter]]:
    """By block: the parameters, by name, that belong to it alone, in the model's order.

    trains_all: False under adapters, whose trained parameters stay on the device.
    """
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    inside = [Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False)) for block in blocks]
    return [
        {
            name: parameter
            for name, parameter in model.named_parameters()
            if own[id(parameter)] == owners[id(parameter)] and (trains_all or not parameter.requires_grad)
        }
        for own in inside
    ]


def name_streamed(model: nn.Module, *, trains_all: bool) -> set[str]:
    """Names of the parameters that have a home where blocks' weights come and go. trains_all: as ``list_streamed``'s."""
    return {name for named in list_streamed(model, find_blocks(model), trains_all=trains_all) for name in named}


class _Streamed:
    """One parameter, its home, and its copy under way."""

    def __init__(self, name: str, parameter: nn.Parameter, home: OffDeviceBytes | DealtHome) -> None:
        self.name = name
        self.parameter = parameter
        self.home = home
        self.coming: Copy | Arriving | None = None

    @property
    def stays(self) -> bool:
        """True where this device is the home."""
        return isinstance(self.home, DealtHome) and self.home.stays

    @property
    def off_device(self) -> OffDeviceBytes | None:
        """Its bytes off the device, on the rank that keeps it."""
        return self.home.stored if isinstance(self.home, DealtHome) else self.home

    def arrive(self) -> None:
        """Compute that is queued from here on finds its numbers."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming.wait()

    def home_tensor(self) -> HomeTensor:
        return HomeTensor(self.home, dtype=self.parameter.dtype, shape=self.parameter.shape)


class Updates(Protocol):
    """The update that is under way, asked whether it has reached the home of a trained tensor."""

    def is_updated(self, name: str) -> bool: ...

    def wait(self, name: str) -> None: ...


class StreamedWeights:
    """The weights of one model's blocks; with ``place`` device, and not dealt out, all stay and nothing is done."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        plan: WeightsPlan,
        shared: SharedHomes | BaseHomes | None = None,
        dealt: DealtWeights | StageWeights | None = None,
    ) -> None:
        """shared: memory that other processes have, too, where homes are in one; one of them gives them their numbers. dealt:
        where ranks keep a part of the weights each, on their devices, and whether that comes to the others in turn.
        """
        self._tiers = tiers
        self._plan = plan
        self._shared = shared
        self._dealt = dealt
        self._read_elsewhere: Callable[[str], torch.Tensor] | None = None
        self._by_block: list[list[_Streamed]] = []
        self._by_name: dict[str, _Streamed] = {}
        self._outside: list[_Streamed] = []
        """Tensors of a cut model that belong to no block."""
        self._streamed_blocks: Sequence[int] = ()
        """Blocks of this rank of a cut model whose weights come and go."""
        self._stage: StageOfModel | None = None
        """The stage that runs, where what it brings stays for all micro-batches."""
        self._present: list[int] = []
        self._updates: Updates | None = None

    def send_home(self, model: nn.Module, *, blocks: Sequence[nn.Module], trains_all: bool) -> None:
        """Take the blocks' weights off the device, and have everything else there. Raises DiskFull, OutOfHostMemory, of several
        ranks SharedMemoryRefused and RankLost.
        """
        if self._plan.place == "device" and self._dealt is None:
            return
        if isinstance(self._dealt, StageWeights):
            leaving = set[str]()
            if self._plan.place != "device":
                self._streamed_blocks = self._dealt.own.blocks
                leaving = {name for named in list_streamed(model, blocks, trains_all=trains_all) for name in named}
            for index, (named, homes) in enumerate(self._dealt.deal(model, blocks)):
                is_outside = index == len(blocks)
                kept = [
                    self._keep(name, each, homes[name], is_outside=is_outside, leaves=name in leaving)
                    for name, each in named.items()
                ]
                self._by_block.append(kept)
            self._outside = self._by_block.pop()
            _move_rest(model, self._tiers.device, staying={id(s.parameter) for s in self._by_name.values()})
            return
        listed = list_streamed(model, blocks, trains_all=trains_all)
        if self._dealt is not None:
            for named, homes in zip(listed, self._dealt.deal(model, listed), strict=True):
                self._by_block.append([self._keep(name, parameter, homes[name]) for name, parameter in named.items()])
            _move_rest(model, self._tiers.device, staying={id(s.parameter) for s in self._by_name.values()})
            return
        if self._shared is not None:
            self._shared.make([_num_bytes(parameter) for named in listed for parameter in named.values()])
        for named in listed:
            self._by_block.append([self._leave(name, parameter) for name, parameter in named.items()])
        if self._shared is not None:
            self._shared.wait_until_filled()
        _move_rest(model, self._tiers.device, staying={id(s.parameter) for s in self._by_name.values()})

    @property
    def is_streaming(self) -> bool:
        return bool(self._by_block)

    def watch(
        self, backbone: nn.Module, blocks: Sequence[nn.Module], *, updates: Updates | None
    ) -> list[RemovableHandle]:
        """Bring and drop weights as the backbone runs forward and backward. updates: None where nothing is trained."""
        # Ranks that keep a part each have all updated theirs before any of them goes on, and must ask for the same blocks; but
        # what a stage of a cut model streams is its own.
        self._updates = updates if self._dealt is None or self._streamed_blocks else None
        if not self.is_streaming:
            return []
        handles: list[RemovableHandle] = []
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._at_forward(index)))
            handles.append(block.register_forward_hook(self._after_forward(index)))
        handles.append(backbone.register_forward_hook(self._at_end))
        return handles

    def begin_stage(self, stage: StageOfModel) -> None:
        """Have a stage of a model that is cut run from now on."""
        if isinstance(self._dealt, StageWeights) and self._dealt.keeps_streamed:
            self._stage = stage

    def end_stages(self) -> None:
        """Leave no streamed weight on the device, at the end of a step or an evaluation of a model that is cut."""
        self._stage = None
        self.release_all()

    def end_pass(self) -> None:
        """Leave no streamed weight on the device, at the end of a forward or backward, unless the next micro-batch uses it."""
        if self._stage is None:
            self.release_all()

    def release_all(self) -> None:
        """Leave no streamed weight on the device."""
        while self._present:
            self._release(self._present[0])

    @property
    def shared_names(self) -> Collection[str]:
        """Tensors whose one home all ranks read."""
        return () if self._shared is None else self._by_name.keys()

    @property
    def dealt_names(self) -> Collection[str]:
        """Tensors that are on the device of one rank alone."""
        return () if self._dealt is None else self._by_name.keys()

    @property
    def owners(self) -> dict[str, int]:
        """By name, the rank that owns each tensor which is on the device of some ranks alone."""
        return {name: streamed.home.owner for name, streamed in self._by_name.items() if isinstance(streamed.home, DealtHome)}

    def is_elsewhere(self, name: str) -> bool:
        """True for a tensor that another rank keeps."""
        home = self._by_name[name].home if name in self._by_name else None
        return isinstance(home, DealtHome) and not home.is_here

    def home_of(self, name: str) -> OffDeviceBytes | None:
        """None for what has no home off the devices. Trained homes are kept up to date by ``host_update.py``."""
        streamed = self._by_name.get(name)
        return None if streamed is None else streamed.off_device

    def own_tensor(self, name: str) -> HomeTensor | None:
        """A tensor that has a home off the devices here, to be read by this rank alone; None for others."""
        home, streamed = self.home_of(name), self._by_name.get(name)
        if home is None or streamed is None:
            return None
        return HomeTensor(home, dtype=streamed.parameter.dtype, shape=streamed.parameter.shape)

    def home_tensor(self, name: str) -> HomeTensor | None:
        """A streamed tensor, to be read when it is needed, of those that are dealt by all ranks together; None for what does not
        stream.
        """
        streamed = self._by_name.get(name)
        return None if streamed is None else streamed.home_tensor()

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replace a streamed tensor's numbers at home."""
        home = self.home_of(name)
        assert home is not None
        home.write(value.contiguous(), dtype=self._by_name[name].parameter.dtype)

    @contextmanager
    def read_from(self, read: Callable[[str], torch.Tensor]) -> Iterator[None]:
        """Inside, what other ranks keep comes by ``read``, which gives a tensor's numbers on the host, so that one rank can run
        the model alone.
        """
        self._read_elsewhere = read if self._dealt is not None else None
        others = [streamed for streamed in self._outside if not streamed.stays]
        try:
            for streamed in others:
                streamed.parameter.data = read(streamed.name).to(self._tiers.device)
            yield
        finally:
            self.release_all()
            for streamed in others:
                leave_one_number(streamed.parameter, self._tiers.device)
            self._read_elsewhere = None

    def bind_homes(self) -> None:
        """Make each home its parameter's data: the model is whole again, in host memory; ranks that share homes have its blocks'
        weights in common. Of weights that are dealt it is for all ranks to call.
        """
        for streamed in self._by_name.values():
            streamed.parameter.data = streamed.home_tensor().load()

    def _leave(self, name: str, parameter: nn.Parameter) -> _Streamed:
        streamed = self._by_name[name] = _Streamed(name, parameter, self._send_away(parameter))
        return streamed

    def _send_away(self, parameter: nn.Parameter) -> OffDeviceBytes:
        """Give a parameter a home, and leave it on the device with a storage of no bytes."""
        read = take_read_later(parameter)
        fills = self._shared is None or self._shared.fills
        data = None if self._shared is None else self._shared.take()
        home = OffDeviceBytes(self._tiers, _num_bytes(parameter), place=self._plan.place, category="weights", data=data)
        if read is not None:
            if not fills:
                return home
            with count_allocations(self._tiers.meter), on_host(self._tiers, "temporaries"):
                data = read()
                home.write(data.contiguous(), dtype=data.dtype)
            return home
        data = parameter.data
        if fills:
            home.write(data.contiguous(), dtype=data.dtype)
        _empty_on(parameter, self._tiers.device)
        return home

    def _keep(
        self, name: str, parameter: nn.Parameter, home: DealtHome, *, is_outside: bool = False, leaves: bool = False
    ) -> _Streamed:
        """On the device where this rank keeps it, or off it where it ``leaves``; else only the place for it, of what is outside
        of a cut model's blocks one number.
        """
        if home.is_here and leaves:
            home.stored = self._send_away(parameter)
            streamed = self._by_name[name] = _Streamed(name, parameter, home)
            return streamed
        read, device = take_read_later(parameter), self._tiers.device
        if home.is_here and read is not None:
            with count_allocations(self._tiers.meter):
                with on_host(self._tiers, "temporaries"):
                    data = read()
                set_region(self._tiers.meter, "weights")
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).copy_(data)
        elif home.is_here:
            if not _is_whole(parameter, device):
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).copy_(parameter.data)
        elif is_outside:
            leave_one_number(parameter, device)
        elif read is None:
            _empty_on(parameter, device)
            if self._tiers.meter is not None:  # adapters beside weights from files are on the device, and counted, by now
                self._tiers.meter.resized(parameter, "weights")
        streamed = self._by_name[name] = _Streamed(name, parameter, home)
        return streamed

    # Coming and going.

    def _at_forward(self, index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._enter(index, is_backward=False)

        return enter

    def _after_forward(self, index: int) -> Callable[..., None]:
        def at_backward(gradient: torch.Tensor) -> None:
            self._enter(index, is_backward=True)

        def watch_output(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple | list) else output
            if hidden.requires_grad:
                hidden.register_hook(at_backward)

        return watch_output

    def _at_end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.end_pass()

    def _list_wanted(self, block: int, *, is_backward: bool) -> Sequence[int]:
        """This block and those that are to be there beside it, in the order in which they come; none where another rank or
        another stage has it.
        """
        order: Sequence[int] = range(len(self._by_block))
        if isinstance(self._dealt, StageWeights) and self._read_elsewhere is None:
            order = self._streamed_blocks
        if block not in order or (self._stage is not None and block not in self._stage.blocks):
            return ()
        if isinstance(self._dealt, StageWeights) and self._stage is not None:
            brought = list_brought(self._dealt.own, self._stage, prefetch=self._plan.prefetch, is_backward=is_backward)
            return (block, *(other for other in brought if other != block))
        if is_backward:
            order = order[::-1]
        position = order.index(block)
        return order[position : position + self._plan.prefetch + 1]

    def _enter(self, entered: int, *, is_backward: bool) -> None:
        """Have a block ready, those that are wanted beside it on their way, and no other on the device."""
        wanted = self._list_wanted(entered, is_backward=is_backward)
        if not wanted:
            return
        for block in [block for block in self._present if block not in wanted]:
            self._release(block)
        for block in wanted:
            # What is still being updated is not worth waiting for ahead of its turn.
            if block not in self._present and (block == wanted[0] or self._is_updated(block)):
                self._fetch(block)
        for streamed in self._by_block[wanted[0]]:
            streamed.arrive()

    def _is_updated(self, block: int) -> bool:
        updates = self._updates
        return updates is None or all(updates.is_updated(streamed.name) for streamed in self._by_block[block])

    def _fetch(self, block: int) -> None:
        self._present.append(block)
        for streamed in self._by_block[block]:
            if self._updates is not None:
                self._updates.wait(streamed.name)
            if not streamed.stays:
                streamed.parameter.untyped_storage().resize_(streamed.home.num_bytes)
                self._note_size(streamed.parameter)
            is_asked_for = self._read_elsewhere is None and not isinstance(self._dealt, StageWeights)
            if is_asked_for or streamed.off_device is not None:
                streamed.coming = streamed.home.fetch(streamed.parameter.data)
            elif self._read_elsewhere is not None and not streamed.stays:
                as_bytes(streamed.parameter.data).copy_(as_bytes(self._read_elsewhere(streamed.name)))
                streamed.coming = NOTHING

    def _release(self, block: int) -> None:
        self._present.remove(block)
        for streamed in self._by_block[block]:
            # What was fetched and never used must have arrived before its memory is handed out again.
            streamed.arrive()
            if not streamed.stays:
                streamed.parameter.untyped_storage().resize_(0)
                self._note_size(streamed.parameter)

    def _note_size(self, parameter: nn.Parameter) -> None:
        if self._tiers.meter is not None:
            self._tiers.meter.resized(parameter, "weights")


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.dtype.itemsize


def _is_whole(parameter: nn.Parameter, device: torch.device) -> bool:
    """True for a parameter that is on the device, contiguous, in a storage of its own."""
    data = parameter.data
    return data.device == device and data.untyped_storage().nbytes() == data.nbytes and data.is_contiguous()


def _empty_on(parameter: nn.Parameter, device: torch.device) -> None:
    """Leave a parameter on the device with a storage of no bytes."""
    if not _is_whole(parameter, device):
        # On the device for a moment, one tensor at a time: torch makes no empty storage of this shape there otherwise.
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    parameter.untyped_storage().resize_(0)


def _move_rest(model: nn.Module, device: torch.device, *, staying: set[int]) -> None:
    """All but the streamed parameters to the device; what is tied stays tied."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in staying and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
