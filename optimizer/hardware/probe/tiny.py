"""A model so small that a step or a pass of it is nothing but what ops cost beside their kernels.

A Llama as transformers has it: what its modules do in Python beside their ops is what most models' do.
"""

from optimizer.models.spec import ModelSpec, read_model_spec

SEQUENCE_LENGTH = 64
_CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE_LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny_spec(num_blocks: int) -> ModelSpec:
    return read_model_spec({**_CONFIG, "num_hidden_layers": num_blocks})
