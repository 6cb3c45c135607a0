"""Benches of verl-logsync: `python -m benchmarks [a b c d start] [--quick]`. See README.md."""
