"""Predictions compared with published training runs, and the prediction error that users must expect."""
