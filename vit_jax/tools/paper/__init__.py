"""Recipes and results of the ViT paper; its tables and figures of your runs."""
