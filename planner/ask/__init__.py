"""Questions about plans: why not another choice, what makes one fit, how many devices it takes, what a change is worth.

Each is answered with the search and the judge that plans are made with; nothing here prices anything.
"""

from planner.ask.choices import Fix, WhyNot, explain_why_not, find_fixes

__all__ = ["Fix", "WhyNot", "explain_why_not", "find_fixes"]
