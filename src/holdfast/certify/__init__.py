"""certify."""
