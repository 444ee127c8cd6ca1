"""Formats of spans: the record, the ring in shared memory, the batch on the wire and the file; and reading
them."""
