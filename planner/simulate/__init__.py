"""Play a plan's schedule out in time and memory."""
