from typing import Any

import torch

from optimizer.models.build import build_model
from optimizer.runtime.job.export.sample_text import generate_tokens
from tests.optimizer.runtime.tiny import VOCAB_SIZE, make_spec


def generate(model: Any, **options: Any) -> list[int]:
    return generate_tokens(model, [1, 2, 3], **{"num_tokens": 8, "window_length": 16, "seed": 4, **options})


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    model = build_model(make_spec())
    assert generate(model) == generate(model)
    assert generate(model, seed=5) != generate(model)


def test_temperature_0_takes_the_likeliest_token_as_transformers_does() -> None:
    model: Any = build_model(make_spec())
    expected = model.eval().generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert generate(model, temperature=0) == expected[0, 3:].tolist()


def test_tokens_the_tokenizer_does_not_know_are_never_drawn() -> None:
    model = build_model(make_spec())
    ids = generate(model, vocab_size=5, num_tokens=20)
    assert max(ids) < 5
    assert max(generate(model, num_tokens=20)) < VOCAB_SIZE


def test_the_window_may_be_shorter_than_the_text() -> None:
    assert len(generate(build_model(make_spec()), num_tokens=12, window_length=4)) == 12


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    model = build_model(make_spec("gpt2"))
    before = torch.get_rng_state()
    generate(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
