"""Tools around training: benchmarks, the paper's tables, plans, a server."""
