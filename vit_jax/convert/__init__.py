"""Checkpoints as programs and packages, and the command that converts."""
