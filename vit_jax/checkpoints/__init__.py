"""Saving checkpoints, opening any format, and transferring weights."""
