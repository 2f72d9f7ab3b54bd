"""How fast the library works through parameters: ratios to a copy, a large merge, what training waits for.

make bench-speed          or          PYTHONPATH=benchmarks .venv/bin/python -m speed --help
"""
