"""The paper's recipes and results, and its tables and figures for your runs."""
