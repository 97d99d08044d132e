"""Around the steps: the run, its optimizer, devices, processes and log."""
