"""Models: one idea a file. They know no data, no config and no training."""
