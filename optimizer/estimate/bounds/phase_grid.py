"""One phase of a generation at many batches and lengths at once: what compute takes, and what is held while it runs. Torch-free.

The same polynomials and rates as in ``shape/compiled.py``, which has one shape in full detail: here shapes are columns of one
array.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimizer.estimate.ops.experts import find_experts, unread_bytes
from optimizer.estimate.ops.op_overhead import op_overhead_s
from optimizer.estimate.ops.op_times import OpTimes
from optimizer.estimate.ops.priced_ops import OpSizes, PricedOps, list_terms
from optimizer.hardware.machine import Machine
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import ForwardRegime, Phase, block_part
from optimizer.profile.ops import EMBEDDING, HEAD, Part
from optimizer.profile.sizes import NUM_MONOMIALS, Shape, monomials
from optimizer.profile.time_kinds import COMPUTE_KINDS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ManyShapes:
    """A phase in one representation of the weights, at many shapes."""

    def __init__(self, phase: Phase, weights: WeightsPlan, shapes: Sequence[Shape], machine: Machine) -> None:
        count = len(shapes)
        num_blocks = len(next(iter(phase.regimes.values()))[0].block_templates)
        self.compute_ms: Floats = np.zeros(count)
        """Milliseconds, by shape, of a micro-batch that runs through all of the model."""
        self.blocks_ms: Floats = np.zeros(count)
        """The part of ``compute_ms`` that the blocks take."""
        self.before: Ints = np.zeros((num_blocks + 1, count), dtype=np.int64)
        """Device bytes above the phase's start before each block, and before the head; keys and values left out."""
        self.rise: Ints = np.zeros_like(self.before)
        """The highest point of each block, and of the head, above its own start."""
        places: dict[int, list[int]] = {}
        regimes: dict[int, ForwardRegime] = {}
        for place, shape in enumerate(shapes):
            regime = phase.regime(weights.representation, shape)
            regimes[id(regime)] = regime
            places.setdefault(id(regime), []).append(place)
        for key, regime in regimes.items():
            self._price_regime(phase, weights, regime, places[key], [shapes[place] for place in places[key]], machine)

    def _price_regime(
        self,
        phase: Phase,
        weights: WeightsPlan,
        regime: ForwardRegime,
        places: list[int],
        shapes: Sequence[Shape],
        machine: Machine,
    ) -> None:
        """Price the shapes of one regime."""
        table = _Table(phase, weights, shapes, machine)
        names = [EMBEDDING, *(block_part(template) for template in regime.block_templates), HEAD]
        parts = {name: phase.parts[regime.parts[name]] for name in dict.fromkeys(names)}
        compute_ms = {name: table.compute_ms(name, part) for name, part in parts.items()}
        held = {name: table.held(part) for name, part in parts.items()}
        self.compute_ms[places] = sum(compute_ms[name] for name in names)
        self.blocks_ms[places] = sum(compute_ms[name] for name in names[1:-1])
        nets = np.array([held[name][0] for name in names[:-1]])
        self.before[:, places] = nets.cumsum(axis=0)
        self.rise[:, places] = np.array([held[name][1] for name in names[1:]])


class _Table:
    """Ops and changes of some shapes."""

    def __init__(self, phase: Phase, weights: WeightsPlan, shapes: Sequence[Shape], machine: Machine) -> None:
        values = np.array([monomials(shape) for shape in shapes], dtype=np.float64).reshape(-1, NUM_MONOMIALS).T
        self._changes: Ints = list_terms(phase).changes @ values.astype(np.int64)
        self._is_on_device = np.array([change.tier == "device" for change in phase.changes], dtype=bool)
        self._runs_ahead = machine.device.kind == "cuda"
        times = OpTimes(machine.rates, weights.dtype, element_dtype=weights.dtype, generates=True)
        sizes = _ManySizes(phase, shapes, values, element_bytes=weights.bytes_per_element)
        self._priced: PricedOps = sizes.priced(times, machine.rates)
        self._is_compute = self._priced.slots < len(COMPUTE_KINDS)

    def compute_ms(self, name: str, part: Part) -> Floats:
        ops = np.array([op for op in part.ops if self._is_compute[op]], dtype=np.int64)
        kernels_s: Floats = self._priced.seconds[ops].sum(axis=0)
        beside_s = op_overhead_s(part, name, self._priced.times, kernels_s=kernels_s, runs_ahead=self._runs_ahead)
        return (kernels_s + beside_s) * 1000

    def held(self, part: Part) -> tuple[Ints, Ints]:
        """Net and rise of a part."""
        changes = [change for change in part.changes if self._is_on_device[change]]
        levels = self._changes[changes].cumsum(axis=0)
        if not len(levels):
            nothing = np.zeros(self._changes.shape[1], dtype=np.int64)
            return nothing, nothing
        return levels[-1], np.maximum(levels.max(axis=0), 0)


class _ManySizes(OpSizes):
    """All ops of a profile, by shape in the second place."""

    def __init__(self, phase: Phase, shapes: Sequence[Shape], values: Floats, *, element_bytes: int) -> None:
        """Evaluate the ops. values: of monomials, by shape in the second place."""
        terms = list_terms(phase)
        self._flops = terms.flops @ values
        self._written_bytes = terms.written_bytes @ values
        self._read_bytes = terms.read_bytes @ values
        if find_experts(phase.ops, element_bytes=element_bytes) is not None:
            unread = [unread_bytes(phase.ops, shape, element_bytes=element_bytes) for shape in shapes]
            self._read_bytes -= np.array(unread).T
        self._alike = terms.alike
