"""What the page asks: one function a question."""
