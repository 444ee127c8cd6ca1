"""One iteration as a value: actions, schedules, passes, checker. Pure Python."""
