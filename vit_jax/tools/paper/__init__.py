"""The paper: its numbers and recipes, and its tables and figures from ours."""
