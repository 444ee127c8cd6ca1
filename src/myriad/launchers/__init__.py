"""Launchers, the ways to start ranks. Each starts the node agents, watches them, and leaves no process
behind."""
