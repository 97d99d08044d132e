"""DETR (arXiv 2005.12872): objects and their boxes and masks."""
