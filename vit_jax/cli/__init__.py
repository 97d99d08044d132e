"""Command lines: flags, exit status, and a module for each command."""
