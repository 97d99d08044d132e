"""Reads and writes foreign checkpoint formats, one format per file."""
