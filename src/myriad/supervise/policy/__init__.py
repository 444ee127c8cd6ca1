"""The recovery policy: what a run does about each fault. Pure: in tests, hours pass in milliseconds."""
