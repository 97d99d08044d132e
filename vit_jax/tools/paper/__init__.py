"""Recipes and results of the ViT paper; tables and a figure of your runs."""
