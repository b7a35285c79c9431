"""Jobs that could only fail are refused when they are submitted, in words that say what would help."""

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput
from optimizer.data.bundled import BUNDLED_ENTRIES, TOKENIZER_FILE
from tests.webapp.conftest import make_spec
from webapp.catalog.models import Dataset, Model
from webapp.jobs.specs.training import read_spec


def test_a_vocabulary_too_small_for_the_bundled_tokenizer_needs_one_of_its_own(
    ada: User, model: Model, dataset: Dataset
) -> None:
    model.has_tokenizer = False
    model.save(update_fields=["has_tokenizer"])
    with pytest.raises(InvalidInput, match="has no tokenizer of its own, and its vocabulary of") as caught:
        read_spec(ada, make_spec(model, dataset))
    assert caught.value.fields["field"] == "model"
    assert "tokenizer.json" in caught.value.hint


def test_the_bundled_tokenizer_has_as_many_entries_as_its_check_says() -> None:
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(TOKENIZER_FILE)).get_vocab_size() == BUNDLED_ENTRIES


def test_data_of_a_few_words_is_refused(ada: User, model: Model, dataset: Dataset) -> None:
    dataset.num_bytes = 30
    dataset.save(update_fields=["num_bytes"])
    with pytest.raises(InvalidInput, match="holds at most 31 tokens; at least 65 tokens are needed") as caught:
        read_spec(ada, make_spec(model, dataset))
    assert "shorter sequence length" in caught.value.hint


def test_one_sample_cannot_be_trained_on_and_validated_with(ada: User, model: Model, dataset: Dataset) -> None:
    spec = make_spec(model, dataset)
    spec["workload"]["packing"] = "off"
    with pytest.raises(InvalidInput, match="holds 1 sample; at least 2 samples are needed"):
        read_spec(ada, spec)
