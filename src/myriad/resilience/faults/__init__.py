"""Breaking a run on purpose, and grading how it is repaired."""
