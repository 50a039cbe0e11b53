"""Builders of well-known models as ONNX graphs: shapes, no weights."""
