"""Progress of long commands: lines where standard error is no terminal, and nothing on standard output."""

import time

import pytest

from myriad.cli import progress_bar

GIB = 2**30


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_FIRST_LINE_SECONDS", 0.01)


def line_with(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """Wait for a line that contains these words."""
    seen = ""
    for _ in range(3000):
        captured = capsys.readouterr()
        assert captured.out == ""
        seen += captured.err
        for line in seen.splitlines():
            if words in line:
                return line
        time.sleep(0.01)
    raise AssertionError(f"no line with {words!r} in {seen!r}")


def test_a_step_that_lasts_long_still_writes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar.count_bar("searching") as show:
        assert line_with(capsys, "searching").startswith("myriad: 0 s: searching")
        show("searching", 12, 86)
        assert line_with(capsys, "12 of 86").endswith("searching: 12 of 86 (14%)")
        show("explaining", 0, 0)
        assert line_with(capsys, "explaining").endswith("s: explaining")


def test_bytes_and_shares_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar.bytes_bar() as show:
        show("tokenizing", GIB, 4 * GIB)
        assert line_with(capsys, "GiB").endswith("tokenizing: 1.0 GiB of 4.0 GiB (25%)")
    with progress_bar.share_bar("measuring") as tell:
        tell("matrix products", 0.5)
        assert line_with(capsys, "products").endswith("measuring: matrix products (50%)")


def test_a_quick_command_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "_FIRST_LINE_SECONDS", 60.0)
    with progress_bar.count_bar("searching") as show:
        show("searching", 1, 2)
    with pytest.raises(KeyError), progress_bar.count_bar("failing"):
        raise KeyError
    assert capsys.readouterr() == ("", "")


def test_lines_end_with_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar.count_bar("searching"):
        line_with(capsys, "searching")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_lines_become_rarer_with_time() -> None:
    lines = progress_bar._Lines("x", lambda done, total: "")
    try:
        lines._started -= 3600
        assert lines._interval(0) < 1
        assert lines._interval(100) == progress_bar._LONGEST_SECONDS
    finally:
        lines.close()
