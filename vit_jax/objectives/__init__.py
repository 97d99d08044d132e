"""Objectives: what is learned."""
