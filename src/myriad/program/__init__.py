"""Description of one iteration: actions, schedules, passes and the checker. Pure Python, no torch."""
