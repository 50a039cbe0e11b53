"""Tests of plans: files, assembly, check, explanation, difference."""
