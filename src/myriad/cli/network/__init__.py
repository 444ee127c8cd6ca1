"""The verbs of `myriad network`."""
