"""If these fail, `myriad watch` starts a text browser in its terminal, or says not how to reach the page."""

import threading
import webbrowser
from pathlib import Path

import pytest

from myriad.cli import watch_command


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pages that a browser was asked to open; nothing of this machine counts."""
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda page: pages.append(page) or threading.Event().wait(60))
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    return pages


def test_no_browser_is_started_where_no_window_can_open(opened: list[str], capsys) -> None:
    watch_command._announce("http://127.0.0.1:8765", None, open_page=True, as_json=False)
    assert opened == []
    assert capsys.readouterr().out == "http://127.0.0.1:8765\n"


def test_a_browser_that_does_not_return_holds_up_nothing(opened, monkeypatch, capsys) -> None:
    monkeypatch.setenv("BROWSER", "w3m")
    watch_command._announce("http://127.0.0.1:8765", None, open_page=True, as_json=False)
    watch_command._announce("http://127.0.0.1:8765", None, open_page=False, as_json=False)
    assert opened == ["http://127.0.0.1:8765"]


def test_a_browser_gets_the_token_by_a_private_file_and_by_no_argument(
    opened, monkeypatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.setenv("BROWSER", "firefox")
    entry = tmp_path / "state" / "watch.html"
    watch_command._announce("http://127.0.0.1:8765", "t" * 32, open_page=True, as_json=False, entry=entry)
    assert opened == [entry.as_uri()]
    assert (
        entry.stat().st_mode & 0o777 == 0o600
        and f"url=http://127.0.0.1:8765/?token={'t' * 32}" in entry.read_text()
    )
    entry.parent.chmod(0o777)
    watch_command._announce("http://127.0.0.1:8765", "u" * 32, open_page=True, as_json=False, entry=entry)
    watch_command._announce("http://127.0.0.1:8765", "u" * 32, open_page=True, as_json=False, entry=None)
    assert len(opened) == 1 and capsys.readouterr().err.count("no browser is opened") == 2


@pytest.mark.parametrize(
    ("connection", "address", "words"),
    [
        ("10.0.0.9 51 10.0.0.2 22", "http://127.0.0.1:8765", "ssh -L 8765:127.0.0.1:8765 ann@10.0.0.2, then"),
        ("10.0.0.9 51 10.0.0.2 2222", "http://[::1]:80", "ssh -p 2222 -L 80:[::1]:80 ann@10.0.0.2, then"),
        ("10.0.0.9 51 10.0.0.2 22", "http://node7:8765", ""),
        ("odd", "http://127.0.0.1:8765", ""),
    ],
)
def test_who_came_by_ssh_reads_what_to_type(
    opened, monkeypatch, capsys, connection: str, address: str, words: str
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setenv("LOGNAME", "ann")
    watch_command._announce(address, None, open_page=False, as_json=False)
    said = capsys.readouterr().err
    assert words in said and bool(said) == bool(words)
    watch_command._announce(address, None, open_page=False, as_json=True)
    assert capsys.readouterr().err == ""
