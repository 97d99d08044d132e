"""Command lines: shared flags, exit status, and some of the commands."""
