"""Tools around training: serving, planning, measuring speed."""
