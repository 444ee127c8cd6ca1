"""Weeks of training with faults, simulated: the real decisions under a virtual clock."""
