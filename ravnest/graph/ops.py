"""The operators a portable graph may use: the allow-list, and what each operator does that a cut must respect.

A provider runs a stranger's graph, so an operator is here only if it computes tensors from tensors: nothing that opens
a file, runs a callable, reads uninitialised memory (`empty`), reinterprets storage (`as_strided`, `set_`) or registers
anything. An operator is named `aten.<name>.<overload>`; the list is by name, and every overload of a name is allowed.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ravnest.errors import GraphError

_ATEN = frozenset(
    """
    __and__ __iand__ __ior__ __lshift__ __or__ __rshift__ __xor__ _log_softmax _softmax _to_copy _unsafe_view
    _weight_norm abs abs_ absolute acos adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add add_ addbmm addcdiv addcdiv_ addcmul addcmul_
    addmm addmv addr alias all alpha_dropout alpha_dropout_ amax amin aminmax any arange argmax argmin argsort asin
    asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm
    bernoulli bernoulli_ bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount bitwise_and
    bitwise_not bitwise_or bitwise_xor block_diag bmm broadcast_tensors broadcast_to bucketize cat cdist ceil ceil_
    celu celu_ channel_shuffle chunk clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ clone col2im
    column_stack concat constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d convolution copy copy_ copysign cos cos_ cosh cosine_embedding_loss cosine_similarity
    count_nonzero cross cross_entropy_loss ctc_loss cummax cummin cumprod cumsum deg2rad detach detach_ diag
    diag_embed diagonal diff dist div div_ divide dot dropout dropout_ dstack einsum elu elu_ embedding
    embedding_bag eq equal erf erf_ erfc erfinv exp exp2 exp_ expand expand_as expm1 expm1_ eye
    feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ fill fill_ flatten flip fliplr
    flipud floor floor_ floor_divide floor_divide_ fmax fmin fmod fmod_ frac full full_like gather ge gelu glu
    greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gt hann_window hardshrink
    hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ hinge_embedding_loss histc hstack huber_loss
    hypot im2col index index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put index_put_
    index_select inner instance_norm isclose isfinite isin isinf isnan kl_div kron kthvalue l1_loss layer_norm le
    leaky_relu leaky_relu_ lerp lerp_ less less_equal lgamma lift_fresh lift_fresh_copy linalg_matrix_norm
    linalg_norm linalg_vector_norm linear linspace log log10 log10_ log1p log1p_ log2 log2_ log_ log_sigmoid
    log_softmax logaddexp logcumsumexp logical_and logical_and_ logical_not logical_not_ logical_or logical_or_
    logical_xor logit logspace logsumexp lstm lt mT margin_ranking_loss masked_fill masked_fill_ masked_scatter
    masked_scatter_ masked_select matmul matrix_H max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d
    maximum mean median meshgrid min minimum mish mish_ mm mode moveaxis movedim mse_loss mul mul_ multi_margin_loss
    multilabel_margin_loss multinomial multiply mv nan_to_num nanmean nanmedian nansum narrow narrow_copy
    native_group_norm native_layer_norm ne neg neg_ negative new_full new_ones new_zeros nll_loss nll_loss2d
    nll_loss_nd nonzero norm normal normal_ not_equal numpy_T one_hot ones ones_like outer pad pairwise_distance
    permute pixel_shuffle pixel_unshuffle poisson_nll_loss polar positive pow pow_ prelu prod quantile rad2deg rand
    rand_like randint randint_like randn randn_like randperm reciprocal reciprocal_ reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 relu6_ relu_ remainder remainder_ repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d reshape reshape_as rms_norm rnn_relu rnn_tanh roll rot90
    round round_ rrelu rsqrt rsqrt_ rsub scalar_tensor scaled_dot_product_attention scatter scatter_ scatter_add
    scatter_add_ scatter_reduce scatter_reduce_ searchsorted select select_scatter selu selu_ sgn sigmoid sigmoid_
    sign sign_ silu silu_ sin sin_ sinc sinh slice slice_scatter smooth_l1_loss soft_margin_loss softmax softplus
    softshrink sort split split_with_sizes sqrt sqrt_ square square_ squeeze squeeze_ stack std std_mean sub sub_
    subtract sum swapaxes swapdims sym_numel sym_size t t_ take take_along_dim tan tanh tanh_ tensor_split tensordot
    threshold threshold_ tile to topk trace transpose transpose_ triangular_solve tril tril_ tril_indices
    triplet_margin_loss triu triu_ triu_indices true_divide trunc trunc_ type_as unbind unflatten unfold uniform
    uniform_ unsqueeze unsqueeze_ upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot view view_as vstack where xlogy
    zero_ zeros zeros_like
    """.split()
)

OWN_GRADIENT = "py.own_gradient"
"""Passes its first list of values on, with the backward pass that the node brings (own_gradient.py runs it)."""


def _without_gradient(outputs: Any, inputs: Any, saved: Any) -> Any:
    return outputs


_PYTHON: dict[str, Callable[..., Any]] = {
    OWN_GRADIENT: _without_gradient,
    "py.getitem": operator.getitem,
    "py.add": operator.add,
    "py.sub": operator.sub,
    "py.mul": operator.mul,
    "py.floordiv": operator.floordiv,
    "py.truediv": operator.truediv,
    "py.mod": operator.mod,
    "py.neg": operator.neg,
    "py.eq": operator.eq,
    "py.ne": operator.ne,
    "py.lt": operator.lt,
    "py.le": operator.le,
    "py.gt": operator.gt,
    "py.ge": operator.ge,
    "py.sym_max": torch.sym_max,
    "py.sym_min": torch.sym_min,
    "py.sym_float": torch.sym_float,
    "py.sym_int": torch.sym_int,
    "py.sym_not": torch.sym_not,
}
"""Arithmetic on sizes (plain integers at run time) and the picking of one result out of several."""

_HEAVY = frozenset(
    """
    addbmm addmm baddbmm bilinear bmm cdist conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    convolution einsum gru linear lstm matmul mm rnn_relu rnn_tanh scaled_dot_product_attention tensordot
    """.split()
)

_RANDOM = frozenset(
    """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ dropout dropout_ feature_alpha_dropout feature_alpha_dropout_
    feature_dropout feature_dropout_ gru lstm multinomial normal normal_ rand rand_like randint randint_like randn
    randn_like randperm rnn_relu rnn_tanh rrelu scaled_dot_product_attention uniform uniform_
    """.split()
)

# These may hand back their argument, or a view of it, although their schema does not say so.
_MAY_ALIAS = frozenset(
    """
    _unsafe_view alpha_dropout atleast_1d atleast_2d atleast_3d broadcast_tensors channel_shuffle dropout einsum
    feature_alpha_dropout feature_dropout meshgrid pad pixel_shuffle pixel_unshuffle type_as
    """.split()
)


def short_name(op: str) -> str:
    """`aten.conv2d.default` -> `conv2d`."""
    return op.split(".")[1]


def is_python(op: str) -> bool:
    return op in _PYTHON


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The callable behind an operator name; GraphError when the name is not on the allow-list."""
    if op in _PYTHON:
        return _PYTHON[op]
    parts = op.split(".")
    if len(parts) != 3 or parts[0] != "aten" or parts[1] not in _ATEN:
        raise GraphError(f"operator {op!r} is not on the allow-list; a graph may only compute tensors from tensors")
    packet = getattr(torch.ops.aten, parts[1], None)
    if packet is None or parts[2] not in packet.overloads():
        raise GraphError(f"operator {op!r} is unknown to torch {torch.__version__}; the two machines' versions differ")
    overload: Callable[..., Any] = getattr(packet, parts[2])
    return overload


def name_of(target: object) -> str | None:
    """The portable name of a captured call target, or None where it has none."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return f"{namespace}.{name}.{target._overloadname}"
    for name, function in _PYTHON.items():
        if target is function:
            return name
    return None


def is_allowed(op: str) -> bool:
    return op in _PYTHON or (op.startswith("aten.") and op.split(".")[1] in _ATEN)


def is_heavy(op: str) -> bool:
    """Whether recomputing this operator on several stages would cost real time."""
    return not is_python(op) and short_name(op) in _HEAVY


def is_random(op: str) -> bool:
    """Whether this operator may draw random numbers."""
    return not is_python(op) and short_name(op) in _RANDOM


@cache
def argument_name(op: str, position: int) -> str:
    """The keyword by which the argument at this position may be given as well (`out`, for one, only ever is)."""
    if is_python(op):
        return ""
    arguments = resolve(op)._schema.arguments  # type: ignore[attr-defined]
    return str(arguments[position].name) if position < len(arguments) else ""


@cache
def device_arguments(op: str) -> tuple[tuple[int, str], ...]:
    """Position and keyword of the arguments that name a device."""
    if is_python(op):
        return ()
    arguments = resolve(op)._schema.arguments  # type: ignore[attr-defined]
    return tuple((i, str(a.name)) for i, a in enumerate(arguments) if "Device" in str(a.type) or a.name == "device")


@cache
def written_arguments(op: str) -> tuple[int, ...]:
    """Positions of the arguments this operator changes in place (batch norm's running statistics included)."""
    if is_python(op):
        return ()
    if short_name(op) in ("batch_norm", "instance_norm"):
        return (3, 4)
    schema = resolve(op)._schema  # type: ignore[attr-defined]
    return tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


@cache
def aliased_arguments(op: str) -> tuple[int, ...]:
    """Positions of the arguments whose memory the result may share: views, in-place results, getitem of a list."""
    if op in ("py.getitem", OWN_GRADIENT):
        return (0,)
    if is_python(op):
        return ()
    schema = resolve(op)._schema  # type: ignore[attr-defined]
    positions = {i for i, a in enumerate(schema.arguments) if a.alias_info is not None}
    if not any(r.alias_info is not None for r in schema.returns):
        positions = set()
    if short_name(op) in _MAY_ALIAS:
        positions.add(1 if short_name(op) == "einsum" else 0)
    return tuple(sorted(positions))
