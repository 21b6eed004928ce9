"""What was measured, side by side with others, each experiment a module: ``python -m tests.benchmarks all``.

Nothing here is a test: how fast something is decides nothing but what the pages of docs/benchmarks say.
"""
