"""Parts of training around the step: optimizer, devices, processes and log."""
