"""If this fails, another user of the machine can take the name of a run's batches first, and end the run."""

from pathlib import Path

import pytest

from myriad.comm.rendezvous.store_secret import STORE_SECRET, new_store_secret
from myriad.run import Run
from myriad.train.data_loader import _meeting_name


def test_who_knows_path_and_port_does_not_know_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_PORT", "20000")
    names = set()
    for _ in range(2):
        monkeypatch.setenv(STORE_SECRET, new_store_secret())
        assert _meeting_name(Run(tmp_path), 0) == _meeting_name(Run(tmp_path), 0)
        names.add(_meeting_name(Run(tmp_path), 0))
    assert len(names) == 2
    monkeypatch.delenv(STORE_SECRET)
    assert _meeting_name(Run(tmp_path), 0) not in names
