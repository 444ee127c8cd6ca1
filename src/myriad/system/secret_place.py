"""Where a run's secret is kept."""

import os
from pathlib import Path

__all__ = ["SECRET_FILE", "secret_place"]

SECRET_FILE = "MYRIAD_SECRET_FILE"
"""Environment variable that names a file with the secret of all runs of this environment, so that the secret
need not lie in a shared folder."""


def secret_place(path: Path) -> Path:
    """Return the path of the secret: ``path`` in the run's folder, or the file that `SECRET_FILE` names."""
    return Path(os.environ.get(SECRET_FILE) or path)
