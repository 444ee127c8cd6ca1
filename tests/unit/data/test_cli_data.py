"""If these fail, `myriad data` prints something else than the library found."""

import json
from pathlib import Path

import pytest
import typer
from tiny_corpora import lines, make_corpus
from typer.testing import CliRunner

from myriad.cli import data_command
from myriad.errors import BadInputError


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    data_command.register(app)
    result = CliRunner().invoke(app, ["data", *arguments])
    if isinstance(result.exception, BadInputError):
        raise result.exception
    return result.exit_code, result.stdout


def prepare(folder: Path, *arguments: str) -> tuple[int, str]:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines(50)))
    common = ("--output", str(folder / "out"), "--key", "body", "--vocabulary", "300", "--workers", "1")
    return run("prepare", str(path), *common, *arguments)


def test_prepare_verify_info(tmp_path: Path) -> None:
    code, output = prepare(tmp_path, "--validation", "0.1", "--json")
    made = json.loads(output)
    assert code == 0 and made["train"]["documents"] + made["validation"]["documents"] == 50
    code, output = run("verify", str(tmp_path / "out"), "--json")
    assert code == 0 and json.loads(output) == {
        "folder": str(tmp_path / "out"),
        "whole": True,
        "problems": [],
    }
    code, output = run("info", str(tmp_path / "out"), "--json", "--samples", "2")
    shown = json.loads(output)
    assert code == 0 and shown["train"] == made["train"]
    assert len(shown["samples"]) == 2 and all(
        any(one in text for text in lines(50)) for one in shown["samples"]
    )


def test_people_read_lines(tmp_path: Path) -> None:
    assert "vocabulary 29" in prepare(tmp_path)[1]
    assert run("verify", str(tmp_path / "out")) == (0, f"{tmp_path / 'out'}: whole\n")
    shown = run("info", str(tmp_path / "out"))[1]
    assert "tokens" in shown and "the beginning of 3 documents" in shown and "skipped" not in shown
    assert "Megatron" in run("info", str(tmp_path / "out" / "train-00000"))[1]


def test_records_without_text_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text"}\n{"text": null}\n{"text": ""}\n')
    options = (
        "prepare",
        str(path),
        "--output",
        str(tmp_path / "out"),
        "--vocabulary",
        "300",
        "--workers",
        "1",
    )
    assert "skipped 2 records without text (1 empty and 1 null)" in run(*options)[1]
    assert json.loads(run(*options, "--json")[1])["skipped"] == {"empty": 1, "null": 1}


def test_damage_is_exit_code_1_with_the_shard(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    (corpus / "train-00000.bin").write_bytes(b"")
    code, output = run("verify", str(corpus))
    assert code == 1 and "train-00000.bin" in output
    assert json.loads(run("verify", str(corpus), "--json")[1])["problems"][0]["file"] == "train-00000.bin"


def test_bad_input_raises_an_error_that_main_prints(tmp_path: Path) -> None:
    for arguments in (("--shard-size", "many"), ("--validation", "2")):
        with pytest.raises(BadInputError):
            prepare(tmp_path, *arguments)
    assert not (tmp_path / "out").exists()
