"""Benchmarks of PipeShift's costs and savings, measured side by side with its alternatives."""
