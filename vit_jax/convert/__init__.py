"""Converts checkpoints to other formats and to programs."""
