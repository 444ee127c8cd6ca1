"""The verb `myriad plan`."""
