"""The run's secret: where it is kept, and how it is made."""

import os
import secrets
from pathlib import Path

from myriad.errors import BadInputError
from myriad.system.whole_file import write_whole

__all__ = ["SECRET_FILE", "run_secret", "secret_place"]

SECRET_FILE = "MYRIAD_SECRET_FILE"
"""Environment variable that names a file with the secret of all runs of this environment, so that the secret
need not lie in a shared folder."""
_SECRET_BYTES = 64
_LEAST_SECRET_BYTES = 32


def secret_place(path: Path) -> Path:
    """Return the path of the secret: ``path`` in the run's folder, or the file that `SECRET_FILE` names."""
    return Path(os.environ.get(SECRET_FILE) or path)


def run_secret(path: Path) -> bytes:
    """Return the run's secret. It is created if it is missing, readable only by its owner. Raises
    `BadInputError` if the file that `SECRET_FILE` names has no valid secret."""
    if (given := secret_place(path)) != path:
        return _read_given(given)
    if not path.exists() or path.stat().st_size != _SECRET_BYTES:  # missing, or cut off by a full disk
        write_whole(path, secrets.token_hex(_SECRET_BYTES // 2), mode=0o600)
    return path.read_bytes()


def _read_given(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadInputError(SECRET_FILE, str(path), f"cannot be read: {error.strerror}") from None
    if len(secret) < _LEAST_SECRET_BYTES:
        raise BadInputError(SECRET_FILE, str(path), f"a file with {_LEAST_SECRET_BYTES} characters or more")
    return secret
