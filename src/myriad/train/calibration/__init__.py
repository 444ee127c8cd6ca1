"""Measure this machine as a cluster that plans can be made for (``myriad plan --measure``)."""
