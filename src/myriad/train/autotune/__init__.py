"""Choices that a run makes by measurement and stores, so that a resumed run computes alike."""
