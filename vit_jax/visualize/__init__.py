"""Pictures of a trained model's attention, filters and position embeddings."""
