"""ONNX to graph: a tuple of small passes over a working graph.

`read` gets the file without its weights, `resolve` walks it once in order and gives every tensor a shape, inlining
functions and control flow on the way; the passes that `planner.importers.onnx` lists then remove what costs nothing and
find the parameters; `freeze` makes the result immutable.
"""
