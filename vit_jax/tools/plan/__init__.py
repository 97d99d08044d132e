"""Estimates time and memory of training on TPUs that are not attached."""
