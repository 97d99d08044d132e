"""DETR (2005.12872): detection of objects with boxes and masks."""
