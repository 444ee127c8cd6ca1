"""The page of a run in the browser, and the server behind it. It only reads: a run never notices."""
