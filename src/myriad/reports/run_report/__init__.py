"""The HTML report of a run: its facts, its page, and the sections of the page."""
