"""Operators that exporters write in other words, one file a pattern; `planner.operators.rewriting` applies them."""
