"""Where the time of a run went: every second in one class."""
