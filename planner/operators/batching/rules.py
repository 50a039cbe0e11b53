"""How the batch travels through each operator: from the marked dimensions of the operands to those of the results.

A mark says where the batch sits inside a dimension: its size is `outer * batch * inner`. A rule reads marks of
operands, writes those of results, and notes which values of constant operands (target shapes) are proportional to the
batch.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.graph import Node
from planner.operators.batching import aligned, indexed, products, shapes
from planner.operators.batching.flow import Flow

Rule = Callable[[Flow, int, Node], None]

_BY_RULE: tuple[tuple[Rule, str], ...] = (
    (
        aligned.broadcast,
        "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean "
        "Min Mod Mul Or PRelu Pow Sub Sum Where Xor com.microsoft.BiasGelu com.microsoft.FastGelu",
    ),
    (
        aligned.same,
        "Abs Acos Acosh Asin Asinh Atan Atanh BatchNormalization BitwiseNot Cast CastLike Ceil Celu Clip Cos Cosh "
        "CumSum DequantizeLinear Dropout DynamicQuantizeLinear Elu Erf Exp EyeLike Floor Gelu GroupNormalization "
        "HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu "
        "Log LogSoftmax LpNormalization MeanVarianceNormalization Mish Neg Not Pad QuantizeLinear RMSNormalization "
        "RandomNormalLike RandomUniformLike Bernoulli Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
        "SimplifiedLayerNormalization Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Trilu "
        "com.microsoft.Gelu com.microsoft.QuickGelu Upsample",
    ),
    (
        aligned.batch_first,
        "AveragePool Col2Im Conv ConvInteger ConvTranspose DeformConv DepthToSpace GlobalAveragePool GlobalLpPool "
        "GlobalMaxPool GridSample LpPool MaxPool QLinearConv SpaceToDepth",
    ),
    (products.matmul, "MatMul MatMulInteger QLinearMatMul com.microsoft.FusedMatMul com.microsoft.MatMulNBits"),
    (products.gemm, "Gemm"),
    (products.einsum, "Einsum"),
    (shapes.transpose, "Transpose"),
    (shapes.reshape, "Reshape Flatten"),
    (shapes.squeeze, "Squeeze"),
    (shapes.unsqueeze, "Unsqueeze"),
    (shapes.concat, "Concat"),
    (shapes.split, "Split"),
    (shapes.slice_, "Slice"),
    (indexed.gather, "Gather"),
    (indexed.gather_nd, "GatherND"),
    (indexed.scatter_nd, "ScatterND"),
    (indexed.scatter_elements, "Scatter ScatterElements"),
    (indexed.like_second, "GatherElements"),
    (shapes.expand, "Expand"),
    (shapes.tile, "Tile"),
    (
        products.reduce,
        "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSum ReduceSumSquare",
    ),
    (indexed.topk, "TopK"),
    (indexed.one_hot, "OneHot"),
    (aligned.rotary, "RotaryEmbedding com.microsoft.RotaryEmbedding"),
    (aligned.recurrent, "GRU LSTM RNN"),
    (aligned.loss, "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"),
    (aligned.resize, "Resize"),
)

RULES: dict[str, Rule] = {op: rule for rule, ops in _BY_RULE for op in ops.split()}
"""Rule by operator; `aligned.leading` serves all others."""
