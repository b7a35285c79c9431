"""Planner's internals stay out of what a form says, and a size without a unit is asked for it."""

import pytest
from django import forms

from webapp.pages.forms.sentences import beside_field, in_words
from webapp.pages.forms.work import BytesField

LABELS = {
    "sequence_length": "Sequence length",
    "learning_rate": "Learning rate",
    "most_loss": "Precision",
    "pin_weights_dtype": "Weights in",
    "pin_logits_and_loss_num_chunks": "Chunks",
    "pin_activations_per_block": "Each block",
}


@pytest.mark.parametrize(
    ("label", "message", "words"),
    [
        (
            "Sequence length",
            "workload.sequence_length is 1000000000; allowed: an integer from 8 to 131,072",
            "Sequence length must be 8 to 131,072",
        ),
        (
            "Learning rate",
            "workload.learning_rate is -1; allowed: a number above 0 to 1",
            "Learning rate must be above 0, at most 1",
        ),
        (
            "Each block",
            "goal.pins.activations.per_block[0] is 'x'; allowed: keep, recompute",
            "Each block must be keep, recompute",
        ),
        (
            "Sequence length",
            "workload.sequence_length is 600; llama has positions for 256 tokens",
            "“Sequence length” is 600; llama has positions for 256 tokens",
        ),
        (
            "Weights in",
            "goal.pins.weights.dtype is bf16, which changes the numbers, and goal.allow_lossy is false",
            "“Weights in” is bf16, which changes the numbers, and “Precision” does not permit that",
        ),
        ("File", "the file is empty", "the file is empty"),
    ],
)
def test_what_is_wrong_with_a_field_is_said_as_the_form_names_it(label: str, message: str, words: str) -> None:
    assert beside_field(message, label=label, labels=LABELS) == words


def test_paths_of_plans_become_labels_or_words() -> None:
    message = "no plan keeps every pin (logits_and_loss.num_chunks 9000): plan.logits_and_loss.num_chunks is 9000"
    assert in_words(message, labels=LABELS) == "no plan keeps every locked setting (“Chunks” 9000): “Chunks” is 9000"
    assert in_words("plan.weights.dtype is 8, which is AdamW's", labels=LABELS) == "“Weights in” is 8, which is AdamW's"
    assert in_words("plan.batch.micro_batch_size is 3", labels={}) == "batch micro batch size is 3"
    assert in_words("model.safetensors is missing. Plan again.", labels=LABELS) == "model.safetensors is missing. Plan again."


@pytest.mark.parametrize("text", ["8", "1.5", " 12 "])
def test_a_number_alone_is_asked_for_its_unit(text: str) -> None:
    with pytest.raises(forms.ValidationError, match="what\\? Write .* GiB or"):
        BytesField().clean(text)
    assert BytesField().clean("8 GiB") == 8 * 2**30
