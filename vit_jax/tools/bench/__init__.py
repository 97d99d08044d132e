"""Benchmarks: `python -m vit_jax.bench --help`."""
