"""A problem to its best decision and a bound; one file a solver."""
