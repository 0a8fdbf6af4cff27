"""What is looked at in a moment, and tells that nothing else has changed: numbers of dicts, flags around a call."""

import contextlib
import functools
import gc
from collections import OrderedDict, defaultdict
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn, mha, mkldnn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from spmd._torch import FLAGS, Around, Unwritten, dict_behind, flags

# ---- numbers of dicts: each write is told by one, however Python makes it ----------------------


class Thing:
    kind = "a"

    def __init__(self):
        self.x, self.y = "x", "y"


class Wrapper(torch.Tensor):
    pass


def set_attribute(x, new):
    x.x = new  # Python writes this line anew when it has run a few times


def merge(x, new):
    vars(x).__ior__({"x": new})


def add(x, new):
    setattr(x, new, new)


def replace(x, new):
    vars(x).pop("x", None)
    vars(x).setdefault("x", new)


def clear(x, new):
    vars(x).clear()
    vars(x)["x"] = new


WRITES = {
    "an attribute": set_attribute,
    "an attribute by name": lambda x, new: setattr(x, "x", new),
    "an item": lambda x, new: vars(x).__setitem__("x", new),
    "an update": lambda x, new: vars(x).update(x=new),
    "merged": merge,
    "added": add,
    "taken out": replace,
    "cleared": clear,
    "the last": lambda x, new: (vars(x).update(x=new), vars(x).popitem()),
}
OBJECTS = {
    "an object": lambda: Thing(),
    "a module": lambda: nn.Linear(1, 1),
    "a tensor": lambda: torch.ones(2).as_subclass(Wrapper),
}


@pytest.mark.parametrize("of", OBJECTS)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_attributes_are_told(name, of):
    """Also the hundredth of one line. Nothing else is told: no read, nor what the collector does."""
    x = OBJECTS[of]()
    unwritten = Unwritten([vars(x)])
    assert unwritten.are_so() and unwritten.written() == []
    for i in range(100):
        WRITES[name](x, f"new {i}")
        assert not unwritten.are_so() and unwritten.written() == [vars(x)]
        unwritten = Unwritten([vars(x)])
    vars(x).get("x"), getattr(x, "x", None), list(vars(x).values()), gc.collect(0)
    assert unwritten.are_so()


@pytest.mark.parametrize("kind", [Thing, nn.Linear, torch.Tensor], ids=lambda kind: kind.__name__)
def test_writes_to_classes_are_told(kind):
    unwritten = Unwritten([dict_behind(vars(kind))])
    for i in range(50):
        kind.new_attribute = f"new {i}"
        assert not unwritten.are_so()
        unwritten = Unwritten([dict_behind(vars(kind))])
    del kind.new_attribute
    assert not unwritten.are_so()


def test_what_has_no_number_that_tells_all():
    """The order of an OrderedDict changes without a write, and a dict of another class may give what it likes."""
    boxes = OrderedDict(a=1), type("Own", (dict,), {})(), [1], None
    assert [dict_behind(box) for box in boxes] == [None] * len(boxes)
    assert all(dict_behind(box) is box for box in (vars(Thing()), {}, defaultdict(list)))


# ---- what is set around a call ------------------------------------------------------------------


@contextlib.contextmanager
def set_by(function, new, get):
    before = get()
    function(new)
    yield
    function(before)


@contextlib.contextmanager
def hooked(register):
    handle = register(lambda *_: None)
    yield
    handle.remove()


def of_autocast(device, new):
    return set_by(functools.partial(torch.set_autocast_dtype, device), new, lambda: torch.get_autocast_dtype(device))


def fills_memory():
    torch.utils.deterministic.fill_uninitialized_memory = not torch.utils.deterministic.fill_uninitialized_memory


AROUND = {
    "gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast on cpu": lambda: torch.autocast("cpu", torch.bfloat16),
    "dtype of autocast on cpu": lambda: of_autocast("cpu", torch.float16),
    "dtype of autocast on cuda": lambda: of_autocast("cuda", torch.bfloat16),
    "default dtype": lambda: set_by(torch.set_default_dtype, torch.float64, torch.get_default_dtype),
    "deterministic algorithms": lambda: set_by(
        torch.use_deterministic_algorithms, True, torch.are_deterministic_algorithms_enabled
    ),
    "deterministic fill uninitialized memory": lambda: set_by(lambda _: fills_memory(), None, lambda: None),
    "flash sdp enabled": lambda: set_by(cuda.enable_flash_sdp, False, cuda.flash_sdp_enabled),
    "mem efficient sdp enabled": lambda: set_by(
        cuda.enable_mem_efficient_sdp, False, cuda.mem_efficient_sdp_enabled
    ),
    "math sdp enabled": lambda: set_by(cuda.enable_math_sdp, False, cuda.math_sdp_enabled),
    "cudnn sdp enabled": lambda: set_by(cuda.enable_cudnn_sdp, not cuda.cudnn_sdp_enabled(), cuda.cudnn_sdp_enabled),
    "cudnn enabled": lambda: cudnn.flags(enabled=False),
    "cudnn benchmark": lambda: cudnn.flags(enabled=cudnn.enabled, benchmark=not cudnn.benchmark),
    "cudnn deterministic": lambda: cudnn.flags(enabled=cudnn.enabled, deterministic=not cudnn.deterministic),
    "mkldnn enabled": lambda: mkldnn.flags(enabled=not mkldnn.enabled, allow_tf32=None),
    "float32 matmul precision": lambda: set_by(
        torch.set_float32_matmul_precision, "high", torch.get_float32_matmul_precision
    ),
    "fast path of attention": lambda: set_by(mha.set_fastpath_enabled, False, mha.get_fastpath_enabled),
    "number of threads": lambda: set_by(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads),
}
OTHERS = {
    "a mode of functions": TorchFunctionMode,
    "a hook on all modules": lambda: hooked(nn.modules.module.register_module_forward_hook),
    "a hook on all optimisers": lambda: hooked(register_optimizer_step_pre_hook),
    "a replaced function": lambda: patch.object(nn.functional, "gelu", torch.relu),
    "a replaced method": lambda: patch.object(torch.Tensor, "new_method", len, create=True),
}


@pytest.mark.parametrize("name", AROUND | OTHERS)
def test_what_is_set_around_a_call_is_told(name):
    """Whoever looks later is told that all is as it was, if it is: what was written among functions, and is as it was,
    is looked at anew."""
    around, before = Around(), dict(zip(FLAGS, flags(), strict=True))
    assert around.is_so()
    with (AROUND | OTHERS)[name]():
        assert not around.is_so()
        now = dict(zip(FLAGS, flags(), strict=True))
    assert name not in AROUND or now[name] != before[name]
    assert Around().is_so() and ("replaced" in name or around.is_so())
