"""Learning from images without labels: MAE and DINO."""
