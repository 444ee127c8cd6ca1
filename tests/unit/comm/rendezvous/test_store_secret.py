"""Where ranks find the secret of their store. If these fail, ranks do not meet, or anybody's may."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from myriad.comm.groups import local_rank
from myriad.comm.rendezvous.store_secret import STORE_SECRET, attempt_secret, new_store_secret, store_secret
from myriad.errors import BadInputError
from myriad.wire.run_secret import SECRET_FILE


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (STORE_SECRET, SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "myriad"


def test_without_a_secret_ranks_use_one_of_the_user_which_only_the_user_can_read(home: Path) -> None:
    with ThreadPoolExecutor(8) as ranks:
        found = set(ranks.map(lambda _: store_secret(), range(8)))
    assert len(found) == 1 and store_secret() in found
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "secret")]
    assert modes == [0o700, 0o600] and (home / "secret").read_bytes() not in found


def test_a_given_secret_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, given = store_secret(), tmp_path / "given"
    given.write_text("x" * 32 + "\n")
    monkeypatch.setenv(SECRET_FILE, str(given))
    of_file = store_secret()
    monkeypatch.setenv(STORE_SECRET, "of this attempt")
    assert store_secret() == b"of this attempt" and len({own, of_file, store_secret()}) == 3
    monkeypatch.setenv(STORE_SECRET, local_rank(0, 1, 1)[STORE_SECRET])
    assert store_secret() == of_file


@pytest.mark.parametrize("content", [None, "short"])
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "given").write_text(content)
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "given"))
    with pytest.raises(BadInputError, match=r"MYRIAD_SECRET_FILE = .*given"):
        store_secret()


def test_attempts_and_tests_have_secrets_of_their_own() -> None:
    of_attempts = {attempt_secret(b"run", "1.20000"), attempt_secret(b"run", "2.20000")}
    assert len(of_attempts | {attempt_secret(b"another", "1.20000"), new_store_secret()}) == 4
