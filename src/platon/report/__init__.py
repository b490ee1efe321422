"""Shows: reads records, never trains."""
