"""Evaluate a model on tasks: read them, score them, and summarize the scores."""
