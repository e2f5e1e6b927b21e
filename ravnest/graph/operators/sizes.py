"""Memory of a call before it is made: its results and the temporary buffers of its kernel.

A graph of ten nodes can ask for more memory than a machine has, so the size of a result is computed first, from the
shapes of the arguments. The figures are upper bounds: exact for the results of most operators, with a margin for a
kernel's own buffers.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from ravnest.graph.operators import index_sizes, product_sizes, shape_sizes, window_sizes
from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.size_parts import (
    all_bytes,
    common_elements,
    copy_bytes,
    element_bytes,
    own_three_times,
    times,
)


def call_bytes(call: Call) -> int:
    """An upper bound of the memory that the call takes; ValueError if its arguments are invalid."""
    rule = _RULES.get(call.short_name)
    if rule is not None:
        return rule(call)
    return common_elements(call) * element_bytes(call)


def logical_bytes(value: Any) -> int:
    """The memory of a result if each element had memory of its own, since most later kernels process or make that
    many elements."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return max((logical_bytes(v) for v in value), default=0) if isinstance(value, tuple | list) else 0


_NO_MEMORY: Final = """
    alias broadcast_tensors broadcast_to detach detach_ diagonal expand expand_as lift_fresh mT matrix_H meshgrid
    moveaxis movedim numpy_T permute positive select slice squeeze squeeze_ swapaxes swapdims sym_numel sym_size t t_
    transpose transpose_ unflatten unfold unsqueeze unsqueeze_ view view_as
"""
_COPIES: Final = """
    atleast_1d atleast_2d atleast_3d channel_shuffle clone contiguous flatten flip fliplr flipud lift_fresh_copy
    narrow narrow_copy pixel_shuffle pixel_unshuffle reshape reshape_as roll rot90 to type_as
"""
_OWN: Final = """
    batch_norm cross_entropy_loss group_norm instance_norm layer_norm multi_margin_loss multilabel_margin_loss
    native_group_norm native_layer_norm nll_loss nll_loss2d nll_loss_nd prelu rms_norm rrelu _weight_norm
"""
_TWICE: Final = """
    aminmax binary_cross_entropy binary_cross_entropy_with_logits glu huber_loss kl_div l1_loss linalg_vector_norm
    logsumexp max min mse_loss nan_to_num norm prod smooth_l1_loss softplus std std_mean var var_mean
"""
_SEVERAL_TIMES: Final = """
    alpha_dropout cosine_similarity dist feature_alpha_dropout hinge_embedding_loss isclose linalg_matrix_norm
    linalg_norm logcumsumexp margin_ranking_loss nanmean nansum pairwise_distance poisson_nll_loss soft_margin_loss
    triplet_margin_loss
"""
_SORTED: Final = "argsort cummax cummin kthvalue median mode nanmedian sort topk"
_RULES: Final[dict[str, Callable[[Call], int]]] = {
    **dict.fromkeys(_NO_MEMORY.split(), shape_sizes.nothing),
    **dict.fromkeys(_COPIES.split(), copy_bytes),
    **dict.fromkeys(_OWN.split(), own_three_times),
    **dict.fromkeys(_TWICE.split(), times(2)),
    **dict.fromkeys(("bucketize", "searchsorted"), index_sizes.searched),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), index_sizes.sampled),
    **dict.fromkeys(("nonzero", "where"), index_sizes.places_of_true),
    **dict.fromkeys(("diff", "isin"), lambda call: 6 * all_bytes(call)),
    "cosine_embedding_loss": index_sizes.compared,
    "triangular_solve": product_sizes.solved,
    **dict.fromkeys(_SEVERAL_TIMES.split(), times(6)),
    **dict.fromkeys(_SORTED.split(), index_sizes.sorted_bytes),
    **dict.fromkeys("cat concat stack hstack vstack dstack column_stack".split(), lambda call: 2 * all_bytes(call)),
    **dict.fromkeys(
        "zeros ones full rand randn new_zeros new_ones new_full randint".split(), shape_sizes.shaped("size")
    ),
    "eye": shape_sizes.eye,
    "arange": shape_sizes.arange,
    "tril_indices": shape_sizes.triangle_indices,
    "triu_indices": shape_sizes.triangle_indices,
    "linspace": shape_sizes.counted("steps"),
    "logspace": shape_sizes.counted("steps"),
    "randperm": shape_sizes.counted("n"),
    "hann_window": lambda call: 4 * max(0, call.number("window_length", 0)) * 8,
    "mm": product_sizes.product("self", "mat2"),
    "bmm": product_sizes.product("self", "mat2"),
    "matmul": product_sizes.product("self", "other"),
    "addmm": product_sizes.product("mat1", "mat2"),
    "baddbmm": product_sizes.product("batch1", "batch2"),
    "addbmm": product_sizes.product("batch1", "batch2"),
    "mv": product_sizes.product("self", "vec"),
    "addmv": product_sizes.product("mat", "vec"),
    "linear": product_sizes.linear,
    "bilinear": product_sizes.bilinear,
    "outer": product_sizes.outer,
    "addr": product_sizes.outer,
    "inner": product_sizes.inner,
    "tensordot": product_sizes.tensordot,
    "einsum": product_sizes.einsum,
    "kron": product_sizes.kron,
    "cdist": product_sizes.cdist,
    "repeat": shape_sizes.repeat,
    "tile": shape_sizes.repeat,
    "repeat_interleave": shape_sizes.repeat_interleave,
    **dict.fromkeys(("pad", "constant_pad_nd"), shape_sizes.pad),
    **{f"{kind}_pad{n}d": shape_sizes.pad for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "diag": shape_sizes.diagonal_matrix,
    "diag_embed": shape_sizes.diagonal_matrix,
    "block_diag": shape_sizes.block_diagonal,
    **dict.fromkeys("conv1d conv2d conv3d convolution".split(), window_sizes.convolution),
    **{f"conv_transpose{n}d": window_sizes.convolution for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": window_sizes.pool(n) for kind in ("avg", "max") for n in (1, 2, 3)},
    "max_pool2d_with_indices": window_sizes.pool(2),
    **{f"adaptive_{kind}_pool{n}d": window_sizes.adaptive(n) for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"upsample_{kind}": window_sizes.upsample(1) for kind in ("nearest1d", "linear1d")},
    **{f"upsample_{kind}": window_sizes.upsample(2) for kind in ("nearest2d", "bilinear2d", "bicubic2d")},
    **{f"upsample_{kind}": window_sizes.upsample(3) for kind in ("nearest3d", "trilinear3d")},
    "im2col": window_sizes.columns,
    "col2im": window_sizes.columns,
    "embedding": index_sizes.embedding,
    "embedding_bag": index_sizes.embedding_bag,
    "index_select": index_sizes.index_select,
    "gather": index_sizes.gather,
    "take": index_sizes.gather,
    "take_along_dim": index_sizes.gather,
    **dict.fromkeys(
        "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split(), index_sizes.scatter
    ),
    **dict.fromkeys("index_add index_add_ index_copy index_copy_ index_fill index_fill_".split(), index_sizes.scatter),
    **dict.fromkeys("slice_scatter select_scatter masked_scatter masked_scatter_".split(), index_sizes.scatter),
    "index": index_sizes.index,
    "index_put": index_sizes.index_put,
    "index_put_": index_sizes.index_put,
    "one_hot": index_sizes.one_hot,
    "bincount": index_sizes.bincount,
    "multinomial": index_sizes.multinomial,
    "quantile": index_sizes.quantile,
    "histc": lambda call: max(0, call.number("bins", 100)) * 16 + call.first().nbytes,
    "scaled_dot_product_attention": product_sizes.attention,
    "ctc_loss": index_sizes.ctc,
    **dict.fromkeys("lstm gru rnn_tanh rnn_relu".split(), product_sizes.recurrent),
    **dict.fromkeys("chunk split split_with_sizes tensor_split unbind".split(), shape_sizes.parts),
    "normal": lambda call: (
        shape_sizes.shaped("size")(call) if call["size"] is not None else 3 * common_elements(call) * 8
    ),
}
