"""Checkpoints: saved, opened whatever wrote them, carried over."""
