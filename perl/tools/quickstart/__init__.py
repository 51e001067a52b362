"""The whole path at the size of two CPU cores: word problems, a base model with wrong habits, and the command."""
