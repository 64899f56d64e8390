"""holdfast."""
