"""Values and names of fields as messages show them."""

from optimizer.base.shown import shown_field


def test_the_path_of_a_field_is_written_in_words() -> None:
    assert shown_field("logits_and_loss.num_chunks") == "logits and loss number of chunks"
    assert shown_field("kv_cache.place") == "KV cache place"
