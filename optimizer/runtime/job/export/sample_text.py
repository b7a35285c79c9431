"""A sample of text from a trained model: token by token, the whole window forward each time, no cache of keys and values.

Slow on purpose of being simple: it is one sample of about a hundred tokens after a job, not a service.
"""

from collections.abc import Sequence

import torch
from torch import nn

from optimizer.models.anatomy import find_anatomy


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    num_tokens: int,
    window_length: int,
    seed: int,
    vocab_size: int | None = None,
    temperature: float = 0.8,
    top_k: int = 40,
) -> list[int]:
    """``num_tokens`` ids that follow the prompt. The same seed gives the same ids.

    window_length: the model sees at most this many of the last tokens. vocab_size: ids from here on are never drawn, for
    tokenizers smaller than the model's output. temperature: 0 takes the likeliest token each time.
    """
    anatomy = find_anatomy(model)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            window = torch.tensor([ids[-window_length:]], device=device)
            result = anatomy.run(window, labels=window, masks={}, at_hidden=lambda hidden: None)
            logits = anatomy.compute_logits(result[:, -1])[0, :vocab_size].float().cpu()
            ids.append(_draw(logits, temperature=temperature, top_k=top_k, generator=generator))
    finally:
        model.train(was_training)
    return ids[len(prompt_ids) :]


def _draw(logits: torch.Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, indices = torch.topk(logits, min(top_k, logits.numel()))
    probabilities = torch.softmax(values / temperature, dim=0)
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])
