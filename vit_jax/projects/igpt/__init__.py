"""iGPT (ICML 2020): images as sequences of pixels."""
