"""Queues, rates and marks over time, as a fluid."""
