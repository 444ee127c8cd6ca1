"""The rank grid and its groups, collectives and point-to-point. ``myriad.comm.layout`` needs no torch."""
