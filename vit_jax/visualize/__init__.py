"""Pictures of a trained model's attention, filters and positions."""
