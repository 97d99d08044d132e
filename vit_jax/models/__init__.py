"""Flax models. Their modules import no data, config or training code."""
