"""Flax models.

Apart from `__main__`, these modules import no code for data or training.
"""
