"""Allow-list of operators, by exact overload.

An entry `name` allows `aten.name.default`; `name:a,b` allows `aten.name.a` and `aten.name.b`. The table has the
overloads that `torch.export` emits for Python code that computes tensors from tensors. It leaves out overloads that
write into `out=` (capture replaces each by a computation and a copy), take a generator or names of dimensions, compute
plain numbers from plain numbers, or are emitted by TorchScript alone. It also leaves out operators that open a file,
run a callable, expose uninitialised memory (`empty`), reinterpret storage (`as_strided`, `set_`, `_unsafe_view`) or
register anything.
"""

from typing import Final

TABLE: Final = """
    __and__:Scalar,Tensor __iand__:Scalar,Tensor __ior__:Scalar,Tensor __lshift__:Scalar,Tensor __or__:Scalar,Tensor
    __rshift__:Scalar,Tensor __xor__:Scalar,Tensor _weight_norm abs abs_ absolute acos adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    add:Scalar,Tensor add_:Scalar,Tensor addbmm addcdiv addcdiv_ addcmul addcmul_ addmm addmv addr alias
    all:default,dim,dims alpha_dropout alpha_dropout_ amax amin aminmax any:default,dim,dims
    arange:default,start,start_step argmax argmin argsort:default,stable asin asinh atan atan2 atanh
    atleast_1d:Sequence,default atleast_2d:Sequence,default atleast_3d:Sequence,default avg_pool1d avg_pool2d
    avg_pool3d baddbmm batch_norm bernoulli:Tensor,default,p bernoulli_:Tensor,float bilinear binary_cross_entropy
    binary_cross_entropy_with_logits bincount bitwise_and:Scalar,Scalar_Tensor,Tensor bitwise_not
    bitwise_or:Scalar,Scalar_Tensor,Tensor bitwise_xor:Scalar,Scalar_Tensor,Tensor block_diag bmm broadcast_tensors
    broadcast_to bucketize:Scalar,Tensor cat cdist ceil ceil_ celu celu_ channel_shuffle chunk clamp:Tensor,default
    clamp_:Tensor,default clamp_max:Tensor,default clamp_max_:Tensor,default clamp_min:Tensor,default
    clamp_min_:Tensor,default clip:Tensor,default clip_:Tensor,default clone col2im column_stack concat
    constant_pad_nd contiguous conv1d:default,padding conv2d:default,padding conv3d:default,padding conv_transpose1d
    conv_transpose2d:input conv_transpose3d:input convolution copy_ copysign:Scalar,Tensor cos cos_ cosh
    cosine_embedding_loss cosine_similarity count_nonzero:default,dim_IntList cross cross_entropy_loss
    ctc_loss:IntList,Tensor cummax cummin cumprod cumsum deg2rad detach detach_ diag diag_embed diagonal diff dist
    div:Scalar,Scalar_mode,Tensor,Tensor_mode div_:Scalar,Scalar_mode,Tensor,Tensor_mode
    divide:Scalar,Scalar_mode,Tensor,Tensor_mode dot dropout dropout_ dstack einsum elu elu_ embedding
    embedding_bag:default,padding_idx eq:Scalar,Tensor erf erf_ erfc erfinv exp exp2 exp_ expand expand_as expm1
    expm1_ eye:default,m feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
    fill:Scalar,Tensor fill_:Scalar,Tensor flatten:using_ints flip fliplr flipud floor floor_
    floor_divide:Scalar,default floor_divide_:Scalar,Tensor fmax fmin fmod:Scalar,Tensor fmod_:Scalar,Tensor frac
    full full_like gather ge:Scalar,Tensor gelu glu greater:Scalar,Tensor greater_equal:Scalar,Tensor grid_sampler
    grid_sampler_2d grid_sampler_3d group_norm gru:data,input gt:Scalar,Tensor hann_window:default,periodic
    hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ hinge_embedding_loss histc hstack
    huber_loss hypot im2col index:Tensor index_add index_add_ index_copy index_copy_
    index_fill:int_Scalar,int_Tensor index_fill_:int_Scalar,int_Tensor index_put index_put_ index_select inner
    instance_norm isclose isfinite isin:Scalar_Tensor,Tensor_Scalar,Tensor_Tensor isinf isnan kl_div kron kthvalue
    l1_loss layer_norm le:Scalar,Tensor leaky_relu leaky_relu_ lerp:Scalar,Tensor lerp_:Scalar,Tensor
    less:Scalar,Tensor less_equal:Scalar,Tensor lgamma lift_fresh lift_fresh_copy linalg_matrix_norm:default,str_ord
    linalg_norm:default,ord_str linalg_vector_norm linear linspace:Scalar_Tensor,Tensor_Scalar,Tensor_Tensor,default
    log log10 log10_ log1p log1p_ log2 log2_ log_ log_sigmoid log_softmax:int logaddexp logcumsumexp logical_and
    logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor logit
    logspace:Scalar_Tensor,Tensor_Scalar,Tensor_Tensor,default logsumexp lstm:data,input lt:Scalar,Tensor mT
    margin_ranking_loss masked_fill:Scalar,Tensor masked_fill_:Scalar,Tensor masked_scatter masked_scatter_
    masked_select matmul matrix_H max:default,dim,other max_pool1d max_pool2d max_pool2d_with_indices max_pool3d
    maximum mean:default,dim median:default,dim meshgrid:default,indexing min:default,dim,other minimum mish mish_
    mm mode moveaxis:int,intlist movedim:int,intlist mse_loss mul:Scalar,Tensor mul_:Scalar,Tensor multi_margin_loss
    multilabel_margin_loss multinomial multiply:Scalar,Tensor mv nan_to_num nanmean nanmedian:default,dim nansum
    narrow:Tensor,default narrow_copy native_group_norm native_layer_norm ne:Scalar,Tensor neg neg_ negative
    new_full new_ones new_zeros nll_loss nll_loss2d nll_loss_nd nonzero
    norm:Scalar,ScalarOpt_dim,ScalarOpt_dim_dtype,ScalarOpt_dtype
    normal:Tensor_Tensor,Tensor_float,float_Tensor,float_float normal_ not_equal:Scalar,Tensor numpy_T one_hot ones
    ones_like outer pad pairwise_distance permute pixel_shuffle pixel_unshuffle poisson_nll_loss polar positive
    pow:Scalar,Tensor_Scalar,Tensor_Tensor pow_:Scalar,Tensor prelu prod:default,dim_int quantile:default,scalar
    rad2deg rand rand_like randint:default,low randint_like:Tensor,default,low_dtype randn randn_like randperm
    reciprocal reciprocal_ reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 relu6_ relu_
    remainder:Scalar,Scalar_Tensor,Tensor remainder_:Scalar,Tensor repeat
    repeat_interleave:Tensor,self_Tensor,self_int replication_pad1d replication_pad2d replication_pad3d reshape
    reshape_as rms_norm rnn_relu:data,input rnn_tanh:data,input roll rot90 round:decimals,default
    round_:decimals,default rrelu rsqrt rsqrt_ rsub:Scalar,Tensor scalar_tensor scaled_dot_product_attention
    scatter:reduce,src,value,value_reduce scatter_:reduce,src,value,value_reduce scatter_add scatter_add_
    scatter_reduce:two scatter_reduce_:two searchsorted:Scalar,Tensor select:int select_scatter selu selu_ sgn
    sigmoid sigmoid_ sign sign_ silu silu_ sin sin_ sinc sinh slice:Tensor slice_scatter smooth_l1_loss
    soft_margin_loss softmax:int softplus softshrink sort:default,stable split:Tensor,sizes split_with_sizes sqrt
    sqrt_ square square_ squeeze:default,dim,dims squeeze_:default,dim,dims stack std:correction,default,dim
    std_mean:correction,default,dim sub:Scalar,Tensor sub_:Scalar,Tensor subtract:Scalar,Tensor
    sum:default,dim_IntList swapaxes swapdims sym_numel sym_size:int t t_ take take_along_dim tan tanh tanh_
    tensor_split:indices,sections,tensor_indices_or_sections tensordot threshold threshold_ tile
    to:device,dtype,dtype_layout,other topk trace transpose:int transpose_ triangular_solve tril tril_ tril_indices
    triplet_margin_loss triu triu_ triu_indices true_divide:Scalar,Tensor trunc trunc_ type_as unbind:int
    unflatten:int unfold uniform_ unsqueeze unsqueeze_ upsample_bicubic2d:default,vec
    upsample_bilinear2d:default,vec upsample_linear1d:default,vec upsample_nearest1d:default,vec
    upsample_nearest2d:default,vec upsample_nearest3d:default,vec upsample_trilinear3d:default,vec
    var:correction,default,dim var_mean:correction,default,dim vdot view:default,dtype view_as vstack
    where:Scalar,ScalarOther,ScalarSelf,default,self xlogy:Scalar_Other,Scalar_Self,Tensor zero_ zeros zeros_like
"""


def _overloads() -> frozenset[str]:
    found = set()
    for entry in TABLE.split():
        name, _, overloads = entry.partition(":")
        found |= {f"aten.{name}.{overload}" for overload in (overloads or "default").split(",")}
    return frozenset(found)


OVERLOADS: Final = _overloads()
"""Full names, such as `aten.add.Tensor`."""
