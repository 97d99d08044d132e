"""Systems around the paper, each whole in its folder."""
