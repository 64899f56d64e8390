"""What a page shows, one module a section."""
