"""In these tests, a DTensor cannot be made with a block that does not match its spec."""

import pytest

from spmd.tensor.eager.dtensor import DTensor


@pytest.fixture(autouse=True)
def honest_specs(monkeypatch):
    """Every DTensor made in the test has a block of the shape and dtype that its spec gives this rank."""
    make = DTensor.__new__

    def checked(cls, local_tensor, spec, *, requires_grad=False):
        shape = spec.local_shape_here()
        assert tuple(local_tensor.shape) == shape, f"{spec}: block {list(local_tensor.shape)}, not {list(shape)}"
        assert local_tensor.dtype == spec.dtype, f"{spec}: block of {local_tensor.dtype}"
        assert type(local_tensor) is not DTensor
        return make(cls, local_tensor, spec, requires_grad=requires_grad)

    monkeypatch.setattr(DTensor, "__new__", staticmethod(checked))
