"""Serves trained models. Only `__main__` and `board` import JAX."""
