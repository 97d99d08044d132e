"""Models and objectives beyond the paper, one folder per topic."""
