"""Evaluators: what is measured."""
