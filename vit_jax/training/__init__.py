"""Training except the step itself: optimizer, devices, processes and log."""
