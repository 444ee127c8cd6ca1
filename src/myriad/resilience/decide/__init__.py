"""What a run is to do about what happens to it: pure, so that in tests hours pass in milliseconds."""
