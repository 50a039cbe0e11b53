"""Model files to graphs, one module a format."""
