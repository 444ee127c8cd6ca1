"""A picture asked for as PNG is one, with its words; a name of neither kind is refused before any work."""

import struct
from pathlib import Path

import pytest

from myriad.cli import output_files
from myriad.cli.output_files import check_picture, write_picture
from myriad.errors import BadInputError

SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 120 40" font-family="sans-serif" font-size="20">
<text x="5" y="25">{}</text></svg>"""


def test_a_png_is_made_of_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    words, none = tmp_path / "words.png", tmp_path / "none.png"
    write_picture("--out", words, SVG.format("0.30"))
    write_picture("--out", none, SVG.format(""))
    assert words.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", words.read_bytes()[16:24]) == (240, 80)
    assert words.stat().st_size > none.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none.png", "words.png"]


def test_what_is_no_picture_or_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match=r"ends in \.svg or \.png"):
        check_picture("--out", Path("a.gif"))
    with pytest.raises(BadInputError, match="there is no folder nowhere/at/all"):
        check_picture("--out", Path("nowhere/at/all/a.svg"))
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'myriad-train\[png\]'"):
        check_picture("--out", Path("a.png"))
    check_picture("--out", Path("a.svg"))
