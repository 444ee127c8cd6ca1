"""Corpora, tokenizer, shards, sampler, node-level loader. ``myriad.data.config`` needs no torch."""
