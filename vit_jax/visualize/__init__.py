"""What a trained model looks at, and what it has learned."""
