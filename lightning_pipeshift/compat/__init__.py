"""The only place that uses private names of torch, torchmetrics, Lightning, NumPy and CPython."""
