"""Hardware profiles: YAML, data only, each figure with its source."""
