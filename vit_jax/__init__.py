"""Vision Transformer in JAX/Flax: models, training, evaluation, tools."""
