"""The page of a run in the browser, and its server. They only read, so a run is not affected."""
