"""What breaks for the user: an ablation of experts that compares other things than it says."""

from expert_ablation_links import EXPERT_ROWS, MoeWork, RowSeconds, expert_table
from myriad.comm.layout import Layout, check_layout, lacks_for_pairs
from myriad.program.config import OverlapConfig


def test_every_row_is_legal_and_changes_one_thing() -> None:
    layouts = [Layout.model_validate(dict(row.layout)) for row in EXPERT_ROWS]
    overlaps = [OverlapConfig.model_validate(dict(row.overlap)) for row in EXPERT_ROWS]
    for layout in layouts:
        check_layout(layout)
        assert layout.world == 4 and layout.dp == 2  # the same tokens in every row
        assert MoeWork().model.experts is not None and MoeWork().model.experts % layout.ep == 0
    assert [layout.num_etp_groups for layout in layouts] == [1, 2, 2, 2, 2]
    assert [layout.expert_dispatch for layout in layouts] == ["expert"] * 2 + ["node"] * 3
    assert [overlap.tensor for overlap in overlaps] == [None, None, None, "turns", None]
    assert [overlap.pairs for overlap in overlaps] == [False] * 4 + [True]
    assert not lacks_for_pairs(layouts[-1], overlaps[-1])


def test_the_table_has_the_quickest_figures_and_what_is_hidden() -> None:
    visits = [RowSeconds(8.0, 2.0, 6.0, 7.5), RowSeconds(9.0, 1.0, 7.0, 7.5)]
    last = [RowSeconds(4.0, 2.0, 4.0, 7.5), RowSeconds(5.0, 3.0, 5.0, 7.5)]
    lines = expert_table("200mbit", MoeWork(), [visits, visits, visits, visits, last]).splitlines()
    assert "| experts cut by tp | 8000 | 1.00 | 1000 | 6000 | -17% |" in lines
    assert "| or pairs instead | 4000 | 2.00 | 2000 | 4000 | 50% |" in lines
