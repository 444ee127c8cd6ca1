"""The secret of an attempt's rendezvous store: where a rank finds it, and what it is derived from.

    ranks of                    derived from                                      through
    a node agent                RUN/secret, or the file MYRIAD_SECRET_FILE names  `STORE_SECRET`
    torchrun, Slurm, a script   the file MYRIAD_SECRET_FILE names                 that file
                                else ~/.local/state/myriad/secret                 that file
    the doctor, a measurement   the doctor's secret, or drawn for one test        a pipe, or `STORE_SECRET`

The environment of a process is readable by its user only, as are the files. The secret of one attempt opens
neither another attempt's store nor the driver. This module does not import torch.
"""

import hmac
import os
import secrets
from pathlib import Path

from myriad.errors import BadInputError
from myriad.system.state_folder import make_private, state_folder
from myriad.system.whole_file import create_whole
from myriad.wire.run_secret import SECRET_FILE, secret_place

__all__ = ["STORE_SECRET", "attempt_secret", "new_store_secret", "store_secret"]

STORE_SECRET = "MYRIAD_STORE_SECRET"
"""Environment variable with the secret of the rendezvous store that a rank uses."""
_LABEL = "myriad rendezvous store"
_LEAST_BYTES = 32


def new_store_secret() -> str:
    """Return a random secret for the store of one test on this machine."""
    return secrets.token_hex(32)


def attempt_secret(secret: bytes, attempt: str) -> str:
    """Derive the secret of one attempt's store from the secret of the run."""
    return hmac.digest(secret, f"{_LABEL}: {attempt}".encode(), "sha256").hex()


def store_secret() -> bytes:
    """Return the secret of the store that this rank uses. Raises `BadInputError` if a file cannot be used."""
    if given := os.environ.get(STORE_SECRET):
        return given.encode()
    try:
        own = state_folder() / "secret"
        path = secret_place(own)
        if path == own:
            make_private(own.parent)
            create_whole(own, secrets.token_hex(32), mode=0o600)
        return attempt_secret(_read(path), "no attempt").encode()
    except OSError as error:
        allowed = f"the ranks need a secret that they share: {error}"
        raise BadInputError(SECRET_FILE, os.environ.get(SECRET_FILE, ""), allowed) from None


def _read(path: Path) -> bytes:
    secret = path.read_bytes().strip()
    if len(secret) < _LEAST_BYTES:
        raise OSError(f"{path} has fewer than {_LEAST_BYTES} characters")
    return secret
