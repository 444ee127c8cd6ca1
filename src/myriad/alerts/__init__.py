"""Alarms of a run: which events raise one, how many become a message, and where messages are sent."""
