"""The packet level: each packet is an event, in compiled code."""
