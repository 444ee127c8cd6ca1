"""Every verb and every option of the command line: a wrong value is one line and exit code 2; help fits."""

import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from myriad.cli.command_line import build_app, run_command

_ROOT = typer.main.get_command(build_app())
_LEAKS = ("Input should", "unable to parse", "Invalid value", "valid integer", "Traceback", "Error(")


def _verbs(command: Any = _ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, verb in command.commands.items():
            yield from _verbs(verb, (*path, name))
    else:
        yield " ".join(path), command


_VERBS = dict(_verbs())


def _types(command: Any) -> dict[str, set[Any]]:
    """The types that each parameter takes, by name."""
    found = {}
    for name, parameter in inspect.signature(command.callback).parameters.items():
        kinds = {typing.get_args(parameter.annotation)[0]} if typing.get_args(parameter.annotation) else set()
        found[name] = {part for kind in kinds for part in (typing.get_args(kind) or (kind,))} - {type(None)}
    return found


def _wrong_values() -> Iterator[tuple[str, str, str]]:
    for verb, command in _VERBS.items():
        types = _types(command)
        for one in command.params:
            if not isinstance(one, typer.core.TyperOption) or one.is_flag:
                continue
            option = max(one.opts, key=len)
            if one.default != "":
                yield verb, option, ""
            if types[one.name] & {int, float}:
                yield verb, option, "two"
            if int in types[one.name]:
                yield from ((verb, option, value) for value in ("1.5", "nan", "1e3"))


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Build the command line once, not in each of hundreds of calls; and have an empty folder."""
    monkeypatch.setattr("typer.main.get_command", lambda app: _ROOT)
    monkeypatch.chdir(tmp_path)


def _refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    """The error of a call that must be refused, as JSON has it."""
    assert run_command([*arguments, "--json"]) == 2, arguments
    out, err = capsys.readouterr()
    error = json.loads(out, parse_constant=pytest.fail)["error"]  # NaN is no JSON
    assert err == f"myriad: error: {error['message']}\n" and err.count("\n") == 1, arguments
    assert not any(leak in err for leak in _LEAKS), err
    return error


@pytest.mark.parametrize("verb", _VERBS)
def test_a_wrong_value_is_refused_with_its_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _, option, value in filter(lambda one: one[0] == verb, _wrong_values()):
        needed = ["job"] * sum(one.required for one in _VERBS[verb].params)
        error = _refused(capsys, [*verb.split(), *needed, option, value])
        assert (error["key"], error["value"]) == (option, value), error


@pytest.mark.parametrize("verb", _VERBS)
def test_what_no_verb_knows_or_what_is_missing_is_refused(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(capsys, [*verb.split(), "--no-such-option"])
    _refused(capsys, [*verb.split(), ""])
    if any(one.required for one in _VERBS[verb].params):
        _refused(capsys, verb.split())


def test_there_are_many_of_them() -> None:
    assert len(_VERBS) > 30 and len(list(_wrong_values())) > 200


@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize("columns", [80, 40])
def test_help_fits_the_terminal_and_explains_each_option(
    verb: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(
        "myriad.cli.job_key_options._show_keys", lambda takes: None
    )  # tested once, in test_cli_help.py
    assert run_command([*verb.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    helps = {one.name: getattr(one, "help", None) or "" for one in _VERBS[verb].params}
    fragments = (
        "",
        "Of",
        "That",
        "With",
        "Also",
        "So",
        "As",
        "Whom",
    )  # a help says what the option is or does
    assert [name for name, text in helps.items() if text.partition(" ")[0] in fragments] == []


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("data prepare texts --output /dev/null/corpus", "--output"),
        ("data prepare texts --output corpus --vocabulary 99999999999", "--vocabulary"),
        ("data info embedded --samples -1", "--samples"),
        ("faults run kill-rank --oversubscribe --folder /dev/null/runs", "--folder"),
        ("network flap --flaps 1e23", "--flaps"),
        ("network place tiny --seed 99999999999999999999999", "--seed"),
        ("top run --every nan", "--every"),
    ],
)
def test_what_once_failed_late_or_badly_is_refused(
    line: str, key: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a few words to train a tokenizer on")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").touch()
    assert _refused(capsys, line.split())["key"] == key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "texts"]
