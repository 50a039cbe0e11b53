"""Who runs which micro-batch of which stage in what order, and what that keeps in memory; one file a schedule."""
