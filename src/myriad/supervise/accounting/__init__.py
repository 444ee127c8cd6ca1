"""The account of a run's time: every second belongs to exactly one class."""
