"""The verbs of `myriad checkpoint`."""
