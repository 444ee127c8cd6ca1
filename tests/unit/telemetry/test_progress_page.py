"""If these fail, whoever watches a rank sees what it is not doing."""

import os
import time

from myriad.telemetry.progress.progress_page import PROGRESS, ProgressPage, _digests, own_row
from myriad.telemetry.spans import Recorder


def test_a_reader_gets_what_a_rank_does(monkeypatch) -> None:
    page = ProgressPage(4)
    monkeypatch.setenv(PROGRESS, page.address(2))
    monkeypatch.setenv("MYRIAD_EPOCH", "3")
    row = own_row()
    assert (page.read(2).pid, page.read(2).epoch, page.read(2).step) == (os.getpid(), 3, -1)
    assert page.read(2).phase == "starting" and page.read(1).pid == 0
    recorder = Recorder(row=row)
    row.step(7)
    with recorder.span("forward"):
        with recorder.span("tensor_comm"):
            inside = page.read(2)
        after = page.read(2)
    assert (inside.activity, inside.entered, inside.left, inside.phase) == ("tensor_comm", 1, 0, "step")
    assert (after.activity, after.entered, after.left, after.step) == ("forward", 1, 1, 7)
    row.step_done()
    with row.within("saving"):
        assert page.read(2).phase == "saving"
    assert page.read(2).phase == "step" and page.read(2).step_ns > 0
    assert 0 <= time.monotonic_ns() - page.read(2).changed_ns < 10**9


def test_a_new_process_begins_its_row_again(monkeypatch) -> None:
    page = ProgressPage(1)
    monkeypatch.setenv(PROGRESS, page.address(0))
    own_row().step(9)
    own_row()
    assert page.read(0).step == -1 and page.read(0).activity == ""


def test_without_a_page_a_rank_does_the_same(monkeypatch) -> None:
    monkeypatch.delenv(PROGRESS, raising=False)
    with Recorder(row=own_row()).span("wait"):
        pass


def test_the_longest_names_are_distinguished() -> None:
    from myriad.program.actions import Kind

    assert max(len(kind) for kind in Kind) <= 16


def test_the_newest_digests_are_there_with_their_steps_and_what_was_agreed_on_comes_back(monkeypatch) -> None:
    page = ProgressPage(2)
    monkeypatch.setenv(PROGRESS, page.address(1))
    row = own_row()
    assert page.read(1).digests == () and row.agreed_step() == -1
    for step in range(12):
        row.digest(10 * step, -(2**63) + step)
    assert page.read(1).digests == tuple((10 * step, -(2**63) + step) for step in range(4, 12))
    page.agree(1, 80)
    assert row.agreed_step() == 80 and page.read(0).digests == ()


def test_a_digest_that_is_just_written_is_not_seen_with_another_ones_step() -> None:
    before, after = [5 + 1, 111, 0, 0], [5 + 1, 222, 7 + 1, 333]
    assert _digests(before, after) == ()
    assert _digests(after, after) == ((5, 222), (7, 333))
