"""What a policy acts in beyond its own text."""
