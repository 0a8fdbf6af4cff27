"""What the transports of all simulations share: a collective is one call, and its result need not be waited for."""

from __future__ import annotations

from typing import Any

import torch

from spmd.mesh import DeviceMesh


class SimulatedTransport:
    """The methods of `spmd.comm.Transport`. Each collective is a `_call` of its kind, with its arguments as data."""

    compares = False  # the simulator does so anyway

    def _call(self, kind: str, x: Any, args: tuple, group: Any) -> Any:
        raise NotImplementedError

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        raise NotImplementedError

    def exchanges_terms(self, device_type: str) -> bool:
        """No: a collective of the simulator is one step, whatever it is."""
        return False

    def all_reduce(self, x, op, group):
        """See `spmd.comm.Transport`, here and below."""
        return self._call("all_reduce", x, (op,), group)

    def all_gather_into_tensor(self, x, n, group):
        return self._call("all_gather_into_tensor", x, (n,), group)

    def reduce_scatter_tensor(self, x, op, n, group):
        return self._call("reduce_scatter_tensor", x, (op, n), group)

    def all_to_all_single(self, x, out_splits, in_splits, group):
        return self._call("all_to_all_single", x, (tuple(out_splits), tuple(in_splits)), group)

    def broadcast(self, x, src, group):
        return self._call("broadcast", x, (src,), group)

    def broadcast_(self, x, src, group):
        received = self.wait_tensor(self.broadcast(x, src, group))
        with torch.no_grad():
            return x.copy_(received)

    def all_reduce_(self, x, op, group):
        received = self.wait_tensor(self.all_reduce(x, op, group))
        with torch.no_grad():
            return x.copy_(received)

    def all_reduce_coalesced(self, xs, op, group):
        return [self.all_reduce(x, op, group) for x in xs]

    def all_gather_into_tensor_coalesced(self, xs, n, group):
        return [self.all_gather_into_tensor(x, n, group) for x in xs]

    def reduce_scatter_tensor_coalesced(self, xs, op, n, group):
        return [self.reduce_scatter_tensor(x, op, n, group) for x in xs]

    def wait_tensor(self, x):
        return x

    def gather_bytes(self, data: bytes, mesh: DeviceMesh, here: object = None) -> list[bytes]:
        return self.gather_objects(data, mesh)

    def stop_comparing(self, mesh: DeviceMesh) -> None:
        """Nothing to do here."""
