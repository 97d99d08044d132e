"""Recipes and results of the ViT paper, and its tables and figures for runs."""
