"""Published stage-partition problems, each with its judge: numbers only, one file a family."""
