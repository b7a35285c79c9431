"""Counts become positions."""

from optimizer.search.arrangements import Line, arrange, arrange_offload_only, summarize


def test_offloaded_blocks_stand_first_and_kept_ones_last():
    assert arrange(5, num_keep=2, num_offload=1, arrangement="first") == (
        "offload",
        "recompute",
        "recompute",
        "keep",
        "keep",
    )


def test_spread_offload_takes_turns_with_recompute():
    assert arrange(5, num_keep=1, num_offload=2, arrangement="spread") == (
        "offload",
        "recompute",
        "offload",
        "recompute",
        "keep",
    )


def test_without_recompute_offload_takes_turns_with_keep():
    assert arrange_offload_only(4, num_keep=2, arrangement="spread") == ("offload", "keep", "offload", "keep")
    assert arrange_offload_only(4, num_keep=3, arrangement="first") == ("offload", "keep", "keep", "keep")


def test_counts_are_met_for_every_split():
    for num_blocks in range(1, 9):
        for num_keep in range(num_blocks + 1):
            for num_offload in range(num_blocks - num_keep + 1):
                for arrangement in ("first", "spread"):
                    blocks = arrange(num_blocks, num_keep=num_keep, num_offload=num_offload, arrangement=arrangement)
                    assert len(blocks) == num_blocks
                    assert blocks.count("keep") == num_keep
                    assert blocks.count("offload") == num_offload


def test_a_line_ends_where_only_the_offloaded_do_not_keep():
    line = Line(num_blocks=6, arrangement="first", num_offload=2)
    assert line.max_keep == 4
    assert line.per_block(line.max_keep) == ("offload",) * 2 + ("keep",) * 4


def test_a_summary_names_only_what_is_used():
    assert summarize(("recompute", "keep", "keep")) == "keep 2, recompute 1"
