"""bitsandbytes' AdamW in 8 bits, which on the CPU device updates large tensors piece by piece. Importing it needs bitsandbytes.

Its CPU kernel makes five fp32 copies of whatever it is given (``update_scratch_bytes``): of a whole embedding that is more than
the state saves. State is quantized in blocks, so pieces of whole blocks give the same bits. A CUDA device holds no copies and
takes each tensor as one.
"""

from typing import Any

import torch
from bitsandbytes.functional import optimizer_update_8bit_blockwise
from bitsandbytes.optim.adamw import AdamW8bit

from optimizer.plan.optimizer_state import QUANTIZATION_BLOCK_ELEMENTS, UPDATE_PIECE_ELEMENTS

_BLOCKS_PER_PIECE = UPDATE_PIECE_ELEMENTS // QUANTIZATION_BLOCK_ELEMENTS


class PiecewiseAdamW8bit(AdamW8bit):
    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """One tensor. group and indices are bitsandbytes' own."""
        state = self.state[p]
        is_small = p.numel() <= UPDATE_PIECE_ELEMENTS or state["state1"].dtype != torch.uint8
        if is_small or p.device.type != "cpu" or p.grad is None:
            super().update_step(group, p, gindex, pindex)  # type: ignore[no-untyped-call]
            return
        config = self.get_config(gindex, pindex, group)  # type: ignore[no-untyped-call]
        state["step"] += 1
        p.data = p.data.contiguous()
        wholes = (p.grad.contiguous(), p.data, state["state1"], state["state2"])
        pieces = zip(*(whole.view(-1).split(UPDATE_PIECE_ELEMENTS) for whole in wholes), strict=True)
        scales = zip(*(state[name].split(_BLOCKS_PER_PIECE) for name in ("absmax1", "absmax2")), strict=True)
        for (gradient, weight, state1, state2), (absmax1, absmax2) in zip(pieces, scales, strict=True):
            optimizer_update_8bit_blockwise(
                self.optimizer_name,
                gradient,
                weight,
                state1,
                state2,
                config["betas"][0],
                config["betas"][1],
                0.0,
                config.get("alpha", 0.0),
                config["eps"],
                state["step"],
                config["lr"],
                state["qmap1"],
                state["qmap2"],
                absmax1,
                absmax2,
                config["weight_decay"],
                gnorm_scale=1.0,
                skip_zeros=config["skip_zeros"],
            )
