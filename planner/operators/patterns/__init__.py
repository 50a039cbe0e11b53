"""Operators that exporters write in other words; `planner.operators.rewriting` applies them."""
