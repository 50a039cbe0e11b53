"""Searches over layouts, one file each."""
