"""A secret that was given in a file is the one that is used; one that is missing or short is refused."""

from pathlib import Path

import pytest

from myriad.errors import BadInputError
from myriad.wire.run_secret import SECRET_FILE, run_secret


def test_a_secret_that_was_given_is_used_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, own = tmp_path / "given", tmp_path / "secret"
    given.write_text("0123456789abcdef" * 2 + "\n")
    monkeypatch.setenv(SECRET_FILE, str(given))
    assert run_secret(own) == b"0123456789abcdef" * 2
    assert not own.exists()
    monkeypatch.delenv(SECRET_FILE)
    assert run_secret(own) == own.read_bytes() != given.read_bytes()


@pytest.mark.parametrize("text", [None, "", "too short"])
def test_one_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """Before anything is started: an empty one would be known to everybody."""
    given = tmp_path / "given"
    if text is not None:
        given.write_text(text)
    monkeypatch.setenv(SECRET_FILE, str(given))
    with pytest.raises(BadInputError, match=SECRET_FILE):
        run_secret(tmp_path / "secret")
