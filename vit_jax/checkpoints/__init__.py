"""Saves checkpoints, opens any format, and transfers weights."""
