"""Endpoints of the page: one function each, from query parameters to JSON or a tile."""
