"""Readers and writers of foreign checkpoint formats, one in each file."""
