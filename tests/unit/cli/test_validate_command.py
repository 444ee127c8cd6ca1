"""If these fail, an option of ``myriad validate`` does nothing, and the errors that it prints answer another
question."""

import json
from pathlib import Path

import pytest

from myriad.cli.main import main

TABLE = "model,gpus,gpu_type,global_batch,iteration_s\nllama3-8b,8,H100,8,4.0\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with two tables of the same name."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(TABLE)
    Path("old").mkdir()
    Path("old/mine.csv").write_text(TABLE)


def validate(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["validate", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine.csv", "--columns", "pp=stages"], "no table has a column 'stages'"),
        (["mine.csv", "--columns", "pp=gpus", "--columns", "cp=gpus"], "each name once on either side"),
        (["mine.csv", "--columns", "pp"], "NAME=YOURS"),
        (["mine.csv", "old/mine.csv"], '"old/mine.csv": each table once'),
        (["megatron_core_h100.csv", "--framework", "nanotron"], "needs a table in the general form"),
        (["megatron_core_h100.csv", "--cluster", "eos-3072xh100"], "needs a table in the general form"),
        (["mine.csv", "--cluster", "laptop"], '"gpus = 8": at most 4'),
        (["old"], "is not a regular file"),
        (["mine.csv", "--out", "rows.csv"], "needs --from-log"),
        (["mine.csv", "--chart", "errors.txt"], "ends in .svg or .png"),
        (["--from-log", "old"], "no run here"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert validate(*arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("myriad: error:") and words in line
    assert sorted(Path().rglob("*")) == before


def test_a_file_here_is_not_taken_for_a_table_of_the_same_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("iterations.csv").write_text(TABLE)
    assert validate("iterations.csv") == 2
    assert "./iterations.csv for the file" in capsys.readouterr().err
    assert validate("./iterations.csv", "--json") == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert len(table["rows"]) == 1


def test_columns_that_are_not_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    header, row = TABLE.splitlines()
    Path("mine.csv").write_text(f"{header},microbatch\n{row},2\n")
    assert validate("mine.csv", "--json") == 0
    printed = capsys.readouterr()
    assert "not read: columns microbatch of mine" in printed.err
    assert json.loads(printed.out)["tables"][0]["rows"][0]["open"]["micro_batch"]
