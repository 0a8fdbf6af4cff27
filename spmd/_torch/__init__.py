"""The only package that touches torch's private names.

Every other module imports them from here, so that one place shows what a new version of torch may break:

    groups                  process groups, collectives of the dispatcher, works
    dispatch_keys           a dispatch key above autograd: composite ops before they are decomposed
    modes                   dispatch modes; whether ops are traced, by whom; Dynamo
    fakes                   fake tensors
    fake_results            what ops gave of those with symbols for sizes
    quick_views             views of these
    functionalize           functional tensors
    symbols                 numbers that stay symbols in a trace
    sizes                   sizes that do, with what is decided by them
    size_nodes              their arithmetic
    number_nodes            that of floats, as Python has it; computed, number_methods, symbolic_math
    known_values            tensors of one number whose value is known in a trace
    handlers                which errors the user's code catches
    read_numbers            both, as Python code of the user sees them
    traces                  make_fx: tensors and their proxies
    trees                   torch's trees, in which sizes stay sizes
    graphs                  nodes of fx graphs
    tensors                 tensor subclasses, memory, wrappers
    identity                a tensor that becomes another one and stays the object that it is
    autograd                what autograd is doing
    later_hooks             hooks of a parameter whose gradient is ready later
    batch_norms             batch norms that average over all batches, in a trace
    recurrent               recurrent layers, made of other ops
    optimizers              hooks of an optimiser's step
    updates                 fused kernels of optimisers
    ops                     schemas and overloads
    quick_functions         functions that run an op in less time
    quick_traces            ops of a trace that its modes record in less time
    simulated_distributed   torch.distributed in a simulation
    checkpoints             torch.distributed.checkpoint
    random_numbers          generators
    versions                whether dicts were written to

    >>> import torch
    >>> from spmd import _torch
    >>> _torch.written(torch.ops.aten.add_.Tensor)
    ('self',)
"""

from __future__ import annotations

# Nested arguments as flat lists, and back.
from torch.utils import _pytree as pytree

from spmd._torch.autograd import (
    GradIsAsked,
    LeafNodes,
    adds_to_leaf,
    after_backward,
    backward_number,
    backward_under,
    below_autograd,
    has_custom_functions,
    in_backward,
    in_forward_ad,
    is_called_by_engine,
    is_zero_without_memory,
    last_node_number,
    leaves_behind,
    running_node_number,
    saved_tensors_are_hooked,
)  # fmt: skip
from spmd._torch.batch_norms import INSTEAD_OF_MODULES, averages_traced
from spmd._torch.carried import Carried
from spmd._torch.checkpoints import ranks_that_save
from spmd._torch.comm_debug import counted_name, is_counted_by_torch
from spmd._torch.computed import NAMES, TARGETS
from spmd._torch.dispatch_keys import (
    FIRST_KEYS,
    decomposed,
    has_first,
    is_autocast_on,
    is_seen_by_more,
    kept_whole,
    run_first,
    run_with_bits,
    undecomposed,
    without_first,
)  # fmt: skip
from spmd._torch.fakes import (
    UNKNOWN_SHAPE,
    FakeTensorMode,
    check_has_shape_function,
    empty_fake,
    fake_errors_unlogged,
    is_faking,
    uncached_fake_mode,
)  # fmt: skip
from spmd._torch.functionalize import (
    FunctionalTensor,
    FunctionalTensorMode,
    all_to_functional,
    as_parameter,
    assignable_data,
    copied_deeply,
    from_functional,
    functional_mode_of,
    gradients_seen,
    memory_shown,
    same_value,
    to_functional,
    write_functional,
)  # fmt: skip
from spmd._torch.graphs import (
    copy_named,
    create_node,
    new_graph,
    node_again,
    operands_of,
    rename,
    set_arguments,
    take_names,
    walked,
)  # fmt: skip
from spmd._torch.groups import (
    FakeWork,
    PlaceholderGroup,
    all_gather_single,
    c10d,
    c10d_functional,
    collectives_may_overlap,
    default_rank,
    default_store,
    group_named,
    group_timeout,
    is_group,
    new_group,
    register_group,
    register_work,
    replace_group,
    unboxed_group,
    unboxed_reduce_op,
    unregister_group,
    works_in_flight,
)  # fmt: skip
from spmd._torch.identity import (
    KEPT_ON_FUNCTIONS,
    become,
    declared,
    grad_dtype,
    obstacles,
    shows_what_is_held,
    take_grad_dtype,
    user_attributes,
)
from spmd._torch.later_hooks import has_hooks, run_gradient_hooks, run_post_hooks, take_hooks, take_post_hooks
from spmd._torch.modes import (
    FLAGS,
    Around,
    TorchDispatchMode,
    add_dynamo_guard,
    constant_in_dynamo,
    flags,
    flags_around,
    frozen_are_constants,
    function_modes,
    hooks_of_all,
    in_symbolic_trace,
    in_trace,
    inference_without_gradients,
    is_any_mode_on,
    is_fake,
    is_tracing,
    kept_whole_in_dynamo,
    left_out_by_dynamo,
    modes_around,
    no_dispatch,
    no_function_modes,
    no_modes,
    not_compiled,
    replaced_functions,
    replaced_once,
    untraced,
)  # fmt: skip
from spmd._torch.number_methods import python_methods
from spmd._torch.ops import (
    PROFILER_OPS,
    UNDECLARED_VIEWS,
    UNDECLARED_WRITES,
    CustomOp,
    OpOverload,
    OpOverloadPacket,
    aliased,
    argument_index,
    arguments,
    functions_of_custom_op,
    in_place_variant,
    is_composite,
    is_traced_python,
    is_view,
    list_ops,
    out_of_place_variant,
    overload_name,
    overloads_of,
    pack_padded_sequence,
    qualified_name,
    returned,
    returns,
    returns_many,
    returns_nothing,
    returns_tensors,
    with_argument,
    without_out,
    writes_first,
    written,
    written_positions,
)  # fmt: skip
from spmd._torch.optimizers import (
    NOTED_IN_OPTIMIZERS,
    is_torchs_own,
    note_step,
    only_counts,
    scaled_steps,
    step_hooks,
)
from spmd._torch.quick_functions import QUICK_FUNCTIONS, quick_function
from spmd._torch.quick_traces import quick_functional_mode
from spmd._torch.random_numbers import Twister, keep_seed, kept_seed, own_seed, own_seeds
from spmd._torch.read_numbers import ErrorOfRun, Integer, TypeOf, ValueRead, asked_by_user, plain_type, read_as_numbers
from spmd._torch.recurrent import recurrent_in_python
from spmd._torch.simulated_distributed import DistributedState, simulated_distributed
from spmd._torch.size_nodes import strides_text
from spmd._torch.sizes import Decision, SizeSymbols
from spmd._torch.symbolic_math import symbolic_math
from spmd._torch.symbols import (
    SYMBOLS,
    Conditions,
    Symbols,
    is_symbol,
    is_unbacked,
    known_value,
    number_now,
    of_size,
    settled,
    size_key,
    symbolic_min_max,
    symbolic_number,
    unknown_value_errors,
)
from spmd._torch.tensors import (
    LOADS_STATE,
    NO_KEYS,
    copy_bits,
    disabled_torch_function,
    is_functorch_wrapper,
    is_loading_before_reading,
    is_transformed,
    memory_of,
    new_wrapper,
    tensors_on,
    unwrapped,
    without_bits,
    without_torch_function,
    wrapper_tensor,
)  # fmt: skip
from spmd._torch.traces import (
    GraphModuleWhenCalled,
    code_when_called,
    forget_constant,
    known_constant,
    node_of,
    not_traced,
    proxy_mode,
    proxy_of,
    seen_as_compiling,
    stand_for,
    stand_ins,
    traced_tensors,
    track,
    with_more_inputs,
    without_cleaning,
    without_layouts,
)
from spmd._torch.trees import node, unflatten
from spmd._torch.updates import FUSED_STEPS, fused_adamw_
from spmd._torch.versions import Unwritten, dict_behind
