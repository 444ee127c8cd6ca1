"""A run on disk: its folder (`run_folder`), the meaning of its lines (`run_lines`), its events in words
(`event_text`), and its scores on tasks (`score_history`)."""

from myriad.run.run_folder import Run, existing_run, nearest_run

__all__ = ["Run", "existing_run", "nearest_run"]
