"""Evaluators, which measure the quality of a model's parameters."""
