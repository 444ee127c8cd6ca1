"""A rank's life: build, loop, close."""
