"""Fused operators, each beside its plain reference."""
